/* The driver's library as a file describes it: one line for the driver, one per GPU, one per part of the GPU above it.
 *
 *   driver|580.65.06          or    error|9
 *   gpu|UUID|NAME|MiB|MiB free|major|minor|compute mode|processes|MIG mode      (-1: not supported, as on WSL2)
 *   part|UUID|NAME|MiB|MiB free
 *
 * FAKE_NVML names the file, which is read by nvmlInit; without it there is no driver.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, NO_LIBRARY = 12, MOST = 32 };
typedef struct {
    char uuid[96], name[96];
    unsigned long long total, available;
    int major, minor, mode, processes, mig, whole;
} Gpu;
static Gpu gpus[MOST];
static char driver[80];
static int count;

static int number(const char *text) { return text ? atoi(text) : 0; }

int nvmlInitWithFlags(unsigned flags) {
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[400];
    if (!file) return NO_LIBRARY;
    count = 0;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        char *kind = strtok(line, "|");
        if (!kind) continue;
        if (!strcmp(kind, "error")) { int code = number(strtok(NULL, "|")); fclose(file); return code; }
        if (!strcmp(kind, "driver")) { strcpy(driver, strtok(NULL, "|")); continue; }
        Gpu *gpu = &gpus[count++];
        gpu->whole = !strcmp(kind, "gpu");
        strcpy(gpu->uuid, strtok(NULL, "|"));
        strcpy(gpu->name, strtok(NULL, "|"));
        gpu->total = (unsigned long long)number(strtok(NULL, "|")) << 20;
        gpu->available = (unsigned long long)number(strtok(NULL, "|")) << 20;
        gpu->major = number(strtok(NULL, "|"));
        gpu->minor = number(strtok(NULL, "|"));
        gpu->mode = number(strtok(NULL, "|"));
        gpu->processes = number(strtok(NULL, "|"));
        gpu->mig = number(strtok(NULL, "|"));
    }
    fclose(file);
    return OK;
}

int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : "Unknown Error"; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { strncpy(out, driver, size); return OK; }

int nvmlDeviceGetCount_v2(unsigned *out) {
    *out = 0;
    for (int i = 0; i < count; i++) *out += gpus[i].whole;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **out) {
    for (int i = 0; i < count; i++)
        if (gpus[i].whole && index-- == 0) { *out = &gpus[i]; return OK; }
    return INVALID;
}

int nvmlDeviceGetMigMode(Gpu *gpu, unsigned *now, unsigned *pending) {
    *now = *pending = gpu->mig > 0;
    return gpu->mig < 0 ? NOT_SUPPORTED : OK;
}

int nvmlDeviceGetMaxMigDeviceCount(Gpu *gpu, unsigned *out) { *out = 7; return OK; }

int nvmlDeviceGetMigDeviceHandleByIndex(Gpu *gpu, unsigned index, Gpu **out) {
    Gpu *part = gpu + 1 + index;
    if (part >= gpus + count) return NOT_FOUND;
    for (Gpu *p = gpu + 1; p <= part; p++)
        if (p->whole) return NOT_FOUND;
    *out = part;
    return OK;
}

int nvmlDeviceGetUUID(Gpu *gpu, char *out, unsigned size) { strncpy(out, gpu->uuid, size); return OK; }
int nvmlDeviceGetName(Gpu *gpu, char *out, unsigned size) { strncpy(out, gpu->name, size); return OK; }

int nvmlDeviceGetMemoryInfo(Gpu *gpu, unsigned long long *out) { /* total, free, used */
    out[0] = gpu->total;
    out[1] = gpu->available;
    out[2] = gpu->total - gpu->available;
    return OK;
}

int nvmlDeviceGetCudaComputeCapability(Gpu *gpu, int *major, int *minor) {
    *major = gpu->major;
    *minor = gpu->minor;
    return OK;
}

int nvmlDeviceGetComputeMode(Gpu *gpu, int *out) { *out = gpu->mode; return gpu->mode < 0 ? NOT_SUPPORTED : OK; }

int nvmlDeviceGetComputeRunningProcesses_v3(Gpu *gpu, unsigned *number, void *out) {
    if (gpu->processes < 0) return NOT_SUPPORTED;
    if (!out && gpu->processes) { *number = gpu->processes; return INSUFFICIENT_SIZE; }
    *number = gpu->processes;
    return OK;
}
