// Starts the page: shows times in the reader's time zone, follows the head's stream of changes, and loads the page's own module.
import { followFleet } from "./stream.js";
import { enhance, refreshOnChanges } from "./tables.js";

const page = document.body.dataset.page;
const STILL = new Set(["settings", "plan", "what-if", "use"]); // nothing that these show changes with each job
enhance(document);
followFleet();
if (page === "fleet") import("./fleet.js").then((module) => module.start());
else if (page === "job") import("./job.js").then((module) => module.start());
else if (!STILL.has(page)) refreshOnChanges();
if (page === "settings") import("./settings.js").then((module) => module.start());
if (page === "what-if") import("./what-if.js").then((module) => module.start());
if (page === "node") import("./node.js").then((module) => module.start());
if (page === "service") import("./service.js").then((module) => module.start());
