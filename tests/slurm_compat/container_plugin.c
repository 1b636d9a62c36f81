/* A plugin for the lab's Slurm that knows the options of the container plugin that many sites install (pyxis), and does nothing with them:
   the command runs on the node itself. The declarations are those of Slurm's <slurm/spank.h>, which a machine without Slurm's headers lacks. */
#include <stddef.h>

struct spank_option {
    char *name;
    char *arginfo;
    char *usage;
    int has_arg;
    int val;
    int (*cb)(int val, const char *optarg, int remote);
};

const char plugin_name[] = "containers";
const char plugin_type[] = "spank";
const unsigned int plugin_version = VERSION;
const unsigned int spank_plugin_version = 1;

static int taken(int val, const char *optarg, int remote) { return 0; }

int spank_option_register(void *spank, struct spank_option *option);

static struct spank_option options[] = {
    {"container-image", "IMAGE", "image", 1, 1, taken},
    {"container-mounts", "MOUNTS", "mounts", 1, 2, taken},
    {"container-workdir", "PATH", "folder", 1, 3, taken},
    {"container-name", "NAME", "name", 1, 4, taken},
    {"container-env", "NAMES", "variables", 1, 5, taken},
    {"container-mount-home", NULL, "home", 0, 6, taken},
    {"no-container-mount-home", NULL, "no home", 0, 7, taken},
    {"container-writable", NULL, "writable", 0, 8, taken},
    {"container-remap-root", NULL, "root", 0, 9, taken},
    {NULL, NULL, NULL, 0, 0, NULL},
};

/* Options that sbatch accepts in a script are registered here, not in a table. */
int slurm_spank_init(void *spank, int count, char **words) {
    for (int at = 0; options[at].name != NULL; at++)
        spank_option_register(spank, &options[at]);
    return 0;
}
