// Starts the page: shows times in the reader's time zone, follows the head's stream of changes, and loads the page's own module.
import { followFleet } from "./stream.js";
import { enhance, refreshOnChanges } from "./tables.js";

const page = document.body.dataset.page;
enhance(document);
followFleet();
if (page === "fleet") import("./fleet.js").then((module) => module.start());
else if (page === "job") import("./job.js").then((module) => module.start());
else refreshOnChanges();
if (page === "node") import("./node.js").then((module) => module.start());
