/* Records the NVTX ranges of a process. NVTX loads this library where NVTX_INJECTION64_PATH names it.
 *
 * Each range that is pushed or popped becomes a line of the file $NVTX_RECORDS/<pid>: `push NAME` or `pop`.
 * The declarations below are those of nvtx3/nvtxDetail/nvtxTypes.h, whose numbers are a part of NVTX's ABI.
 */
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { EXPORT_CALLBACKS = 1, MODULE_CORE = 1, RANGE_PUSH_A = 9, RANGE_POP = 11 };

typedef void (*Function)(void);

struct Callbacks {
    size_t struct_size;
    int (*get_module_functions)(int module, Function ***functions, unsigned int *count);
};

typedef const void *(*GetExportTable)(uint32_t table);

static int records = -1;

/* One write for each line, so that lines of several threads do not mix. */
static int record(const char *what, const char *name) {
    char line[512];
    int length = snprintf(line, sizeof line, "%s%s\n", what, name);
    if (length < 0 || length >= (int)sizeof line || write(records, line, (size_t)length) != length) abort();
    return 0;
}

static int push(const char *name) { return record("push ", name); }

static int pop(void) { return record("pop", ""); }

/* NVTX calls this once, before the first range. 1 means success. */
int InitializeInjectionNvtx2(GetExportTable get_export_table) {
    const char *folder = getenv("NVTX_RECORDS");
    const struct Callbacks *callbacks = get_export_table(EXPORT_CALLBACKS);
    Function **functions = NULL;
    unsigned int count = 0;
    char path[4096];
    if (folder == NULL || callbacks == NULL) return 0;
    if (!callbacks->get_module_functions(MODULE_CORE, &functions, &count) || count <= RANGE_POP) return 0;
    snprintf(path, sizeof path, "%s/%d", folder, (int)getpid());
    records = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (records < 0) return 0;
    *functions[RANGE_PUSH_A] = (Function)push;
    *functions[RANGE_POP] = (Function)pop;
    return 1;
}
