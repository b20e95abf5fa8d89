/* A stand-in for libnvidia-ml.so.1: the same functions and records, told what to say by a file.
 *
 * The file is named by NVML_STAND_IN and read anew at every call, so that a test can change a GPU
 * while a process is using it. Written by state.py, which documents its lines. Nothing is kept
 * between calls but what the real library keeps: whether it is initialised, and its handles.
 */
#include <ctype.h>
#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <fcntl.h>
#include <unistd.h>

#ifndef VERSION
#define VERSION "580.65.06"
#endif

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    TIMED_OUT = 10,
    GPU_IS_LOST = 15,
    CRASH = 9999,  /* not an answer: the call raises SIGSEGV */
    MISMATCH = 18,
    UNKNOWN = 999,
};

enum { MOST_GPUS = 16, MOST_PROCESSES = 64, MOST_RULES = 32, TEXT = 96, MOST_XIDS = 64, MOST_PARTS = 7, MOST_LINKS = 18 };

/* ---- the records of the ABI ---- */

struct memory_v1 { unsigned long long total, available, used; };
struct memory_v2 { unsigned int version; unsigned long long total, reserved, available, used; };
struct process_v1 { unsigned int pid; unsigned long long memory; };
struct process_v2 { unsigned int pid; unsigned long long memory; unsigned int gi, ci; };
struct process_long { struct process_v2 process; unsigned long long protected_memory; };
struct set_limits { const char *name_space; unsigned long long soft, hard; };
struct get_limits { const char *name_space; unsigned long long soft, hard, used; };
struct pci { char legacy[16]; unsigned int domain, bus, device, id, subsystem; char bus_id[32]; };
struct utilization { unsigned int gpu, memory; };

/* ---- the state ---- */

struct rule { char function[TEXT]; long value; };
struct rules { int count; struct rule rule[MOST_RULES]; };
struct process { int kind; unsigned int pid; unsigned long long memory; };
struct sample { unsigned int pid; unsigned long long at; unsigned int sm, memory, enc, dec; };
struct part { char uuid[TEXT]; unsigned long long total, used, reserved; int count; struct process process[8]; struct rule fault; };
struct gpu {
    char uuid[TEXT], name[TEXT], held[512], bus[32];
    unsigned long long total, used, reserved;
    int power, power_limit;
    int utilization, temperature, mig, minor, long_records, count;
    long step; /* of memory limits, rounded down; below zero: up; zero: not kept at all */
    struct process process[MOST_PROCESSES];
    struct rules faults, delays;
    int compute_mode;
    int ecc, remap_pending, remap_failed, pages_pending, recovery;
    int xid_count, xid_runs;
    struct xid_run { int code, times; } xid_run[MOST_XIDS];
    int sample_count;
    struct sample sample[MOST_PROCESSES];
    int parts;
    struct part part[MOST_PARTS];
    int parent, stays_lost;
    int links, ancestors, ancestor[MOST_GPUS];
    char link[MOST_LINKS][32]; /* the address of what is at the other end, or - if it is inactive */
    unsigned long long nodes, cpus;
};
enum { COMPUTE = 'c', GRAPHICS = 'g' };

struct state {
    char driver[TEXT], calls[512], limits[512], told[512];
    unsigned long long chance, seed;
    int count;
    struct gpu gpu[MOST_GPUS], shown;
    struct rules faults, delays;
};

static void add_rule(struct rules *rules, const char *text)
{
    struct rule *rule = &rules->rule[rules->count];
    if (rules->count < MOST_RULES && sscanf(text, "%95s %ld", rule->function, &rule->value) == 2)
        rules->count++;
}

static void add_process(struct gpu *gpu, int kind, const char *text)
{
    struct process *process = &gpu->process[gpu->count];
    if (gpu->count < MOST_PROCESSES && sscanf(text, "%u %llu", &process->pid, &process->memory) == 2) {
        process->kind = kind;
        gpu->count++;
    }
}

static void add_sample(struct gpu *gpu, const char *text)
{
    struct sample *sample = &gpu->sample[gpu->sample_count];
    if (gpu->sample_count < MOST_PROCESSES
        && sscanf(text, "%u %u", &sample->pid, &sample->sm) == 2) {
        sample->at = 1700000000000000ull + (unsigned long long)gpu->sample_count++;
    }
}

static void add_xids(struct gpu *gpu, const char *text)
{
    struct xid_run *run = &gpu->xid_run[gpu->xid_runs];
    if (gpu->xid_runs < MOST_XIDS && sscanf(text, "%d %d", &run->code, &run->times) == 2) {
        gpu->xid_count += run->times;
        gpu->xid_runs++;
    }
}

static void read_part_line(struct gpu *gpu, const char *word, const char *rest)
{
    struct part *part = gpu->parts ? &gpu->part[gpu->parts - 1] : NULL;
    if (!strcmp(word, "part") && gpu->parts < MOST_PARTS) {
        part = &gpu->part[gpu->parts++];
        sscanf(rest, "%95s %llu %llu %llu", part->uuid, &part->total, &part->used, &part->reserved);
    } else if (part && !strcmp(word, "part_process") && part->count < 8) {
        struct process *process = &part->process[part->count++];
        sscanf(rest, "%u %llu", &process->pid, &process->memory);
        process->kind = COMPUTE;
    } else if (part && !strcmp(word, "part_fault")) {
        sscanf(rest, "%95s %ld", part->fault.function, &part->fault.value);
    }
}

static void read_link_line(struct gpu *gpu, const char *word, const char *rest)
{
    if (!strcmp(word, "link") && gpu->links < MOST_LINKS)
        snprintf(gpu->link[gpu->links++], sizeof gpu->link[0], "%.31s", rest);
    else if (!strcmp(word, "ancestor") && gpu->ancestors < MOST_GPUS)
        gpu->ancestor[gpu->ancestors++] = atoi(rest);
    else if (!strcmp(word, "affinity")) sscanf(rest, "%llu %llu", &gpu->nodes, &gpu->cpus);
    else read_part_line(gpu, word, rest);
}

static void read_gpu_line(struct gpu *gpu, const char *word, const char *rest)
{
    if (!strcmp(word, "name")) snprintf(gpu->name, TEXT, "%s", rest);
    else if (!strcmp(word, "memory"))
        sscanf(rest, "%llu %llu %llu", &gpu->total, &gpu->used, &gpu->reserved);
    else if (!strcmp(word, "utilization")) gpu->utilization = atoi(rest);
    else if (!strcmp(word, "sample")) add_sample(gpu, rest);
    else if (!strcmp(word, "temperature")) gpu->temperature = atoi(rest);
    else if (!strcmp(word, "power")) sscanf(rest, "%d %d", &gpu->power, &gpu->power_limit);
    else if (!strcmp(word, "mig")) gpu->mig = atoi(rest);
    else if (!strcmp(word, "minor")) gpu->minor = atoi(rest);
    else if (!strcmp(word, "bus")) snprintf(gpu->bus, sizeof gpu->bus, "%.31s", rest);
    else if (!strcmp(word, "step")) gpu->step = atol(rest);
    else if (!strcmp(word, "long_records")) gpu->long_records = atoi(rest);
    else if (!strcmp(word, "compute")) add_process(gpu, COMPUTE, rest);
    else if (!strcmp(word, "graphics")) add_process(gpu, GRAPHICS, rest);
    else if (!strcmp(word, "stays_lost")) gpu->stays_lost = atoi(rest);
    else if (!strcmp(word, "compute_mode")) gpu->compute_mode = atoi(rest);
    else if (!strcmp(word, "health"))
        sscanf(rest, "%d %d %d %d %d", &gpu->ecc, &gpu->remap_pending, &gpu->remap_failed,
               &gpu->pages_pending, &gpu->recovery);
    else if (!strcmp(word, "xid")) add_xids(gpu, rest);
    else if (!strcmp(word, "held")) snprintf(gpu->held, sizeof gpu->held, "%s", rest);
    else read_link_line(gpu, word, rest);
}

static void read_line(struct state *state, char *line)
{
    struct gpu *gpu = state->count ? &state->gpu[state->count - 1] : NULL;
    line[strcspn(line, "\n")] = 0;
    char *rest = strchr(line, ' ');
    if (!rest) return;
    *rest++ = 0;
    if (!strcmp(line, "gpu")) {
        if (state->count < MOST_GPUS)
            snprintf(state->gpu[state->count++].uuid, TEXT, "%s", rest);
    } else if (!strcmp(line, "fault")) add_rule(gpu ? &gpu->faults : &state->faults, rest);
    else if (!strcmp(line, "delay")) add_rule(gpu ? &gpu->delays : &state->delays, rest);
    else if (gpu) read_gpu_line(gpu, line, rest);
    else if (!strcmp(line, "driver")) snprintf(state->driver, TEXT, "%s", rest);
    else if (!strcmp(line, "told")) snprintf(state->told, sizeof state->told, "%s", rest);
    else if (!strcmp(line, "chance")) sscanf(rest, "%llu %llu", &state->chance, &state->seed);
    else if (!strcmp(line, "limits")) snprintf(state->limits, sizeof state->limits, "%s", rest);
    else if (!strcmp(line, "calls")) snprintf(state->calls, sizeof state->calls, "%s", rest);
}

/* What processes have allocated on a GPU: a file for each in the folder that the state names. */
static void add_holders(struct gpu *gpu)
{
    DIR *folder = opendir(gpu->held);
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        char path[800], text[TEXT];
        unsigned long long memory;
        snprintf(path, sizeof path, "/proc/%s", entry->d_name);
        if (!isdigit((unsigned char)entry->d_name[0]) || access(path, F_OK)) continue;
        snprintf(path, sizeof path, "%s/%s", gpu->held, entry->d_name);
        FILE *file = fopen(path, "re");
        if (!file) continue;
        if (fscanf(file, "%llu", &memory) == 1) {
            snprintf(text, sizeof text, "%.20s %llu", entry->d_name, memory);
            add_process(gpu, COMPUTE, text);
            gpu->used += memory;
        }
        fclose(file);
    }
    if (folder) closedir(folder);
    /* No GPU gives out more than it has: some of these would have been refused. */
    if (gpu->used > gpu->total - gpu->reserved) gpu->used = gpu->total - gpu->reserved;
}

static void load(struct state *state)
{
    char line[1024];
    memset(state, 0, sizeof *state);
    const char *path = getenv("NVML_STAND_IN");
    FILE *file = path ? fopen(path, "re") : NULL;
    if (!file) return;
    while (fgets(line, sizeof line, file)) read_line(state, line);
    fclose(file);
    for (int i = 0; i < state->count; i++)
        if (state->gpu[i].held[0]) add_holders(&state->gpu[i]);
}

/* A name that ends in a star stands for all that begin so. */
static long rule_for(const struct rules *rules, const char *function)
{
    for (int i = 0; i < rules->count; i++) {
        const char *name = rules->rule[i].function;
        size_t length = strcspn(name, "*");
        if (name[length] ? !strncmp(name, function, length) : !strcmp(name, function))
            return rules->rule[i].value;
    }
    return 0;
}

/* ---- sessions and handles ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int started, sessions;
static char known[MOST_GPUS * 8][TEXT];
static int known_count;
static int lost_in[MOST_GPUS * 8]; /* the last session that lost the GPU of a slot */

static void *handle_of(const char *uuid)
{
    pthread_mutex_lock(&lock);
    int slot = 0;
    while (slot < known_count && strcmp(known[slot], uuid)) slot++;
    if (slot == known_count && known_count < MOST_GPUS * 8)
        snprintf(known[known_count++], TEXT, "%s", uuid);
    uintptr_t handle = ((uintptr_t)sessions << 16) | ((uintptr_t)slot + 1);
    pthread_mutex_unlock(&lock);
    return (void *)handle;
}

/* A MIG device is looked at like a GPU of its own, with the faults of the one that it is a part of. */
static struct gpu *part_of(struct state *state, const char *uuid)
{
    for (int i = 0; i < state->count; i++) {
        struct gpu *parent = &state->gpu[i];
        for (int j = 0; j < parent->parts; j++) {
            struct part *part = &parent->part[j];
            if (strcmp(part->uuid, uuid)) continue;
            struct gpu *gpu = &state->shown;
            memset(gpu, 0, sizeof *gpu);
            snprintf(gpu->uuid, TEXT, "%s", uuid);
            snprintf(gpu->name, TEXT, "%.60s MIG part %d", parent->name, j);
            gpu->total = part->total, gpu->used = part->used, gpu->reserved = part->reserved;
            gpu->count = part->count;
            gpu->mig = parent->mig; /* nobody says that drivers refuse to tell */
            memcpy(gpu->process, part->process, sizeof part->process);
            gpu->faults = parent->faults, gpu->delays = parent->delays;
            gpu->compute_mode = parent->compute_mode;
            if (part->fault.value && gpu->faults.count < MOST_RULES)
                gpu->faults.rule[gpu->faults.count++] = part->fault;
            gpu->parent = 1;
            return gpu;
        }
    }
    return NULL;
}

/* A handle of an earlier session is as good as none. */
static struct gpu *gpu_of(struct state *state, void *handle)
{
    uintptr_t value = (uintptr_t)handle;
    int slot = (int)(value & 0xffff) - 1;
    if ((value >> 16) != (uintptr_t)sessions || slot < 0 || slot >= known_count) return NULL;
    for (int i = 0; i < state->count; i++)
        if (!strcmp(state->gpu[i].uuid, known[slot])) return &state->gpu[i];
    return part_of(state, known[slot]);
}

/* ---- what every call goes through ---- */

static void append(const char *path, const char *line, int length)
{
    if (!path[0]) return;
    int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0) return;
    if (write(file, line, (size_t)length) < 0) { /* a test that counts lines will see it */ }
    close(file);
}

static void note(const struct state *state, const char *function, const struct gpu *gpu)
{
    char line[TEXT * 3];
    int length = snprintf(line, sizeof line, "%s %s\n", function, gpu ? gpu->uuid : "-");
    append(state->calls, line, length);
}

/* Write down, with the time, what a caller was told: the code, and bytes in use if that was asked. */
static void note_told(const struct state *state, const char *function, const char *uuid, int code,
                      unsigned long long used)
{
    char line[TEXT * 4];
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    long long us = (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000;
    int length = snprintf(line, sizeof line, "%lld %s %s %d %llu\n", us, function, uuid, code, used);
    append(state->told, line, length);
}

/* Fail by chance: the state says how many calls in a million, and the seed of what chance does. */
static int draw_mischance(const struct state *state)
{
    static const int codes[] = {10, 11, 15, 17, 19, 20, 21, 23, 999}; /* no answer, this time */
    static unsigned long long drawn;
    if (!state->chance) return SUCCESS;
    unsigned long long z = state->seed + 0x9e3779b97f4a7c15ull * __sync_add_and_fetch(&drawn, 1);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull; /* splitmix64 */
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    if (z % 1000000 >= state->chance) return SUCCESS;
    return codes[(z >> 32) % (sizeof codes / sizeof *codes)];
}

static long milliseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Sleep as long as the state asks for; a delay below zero lasts until the state is changed. */
static void wait_out(struct state *state, const char *function, void *handle)
{
    const struct timespec moment = {0, 2000000};
    long begun = milliseconds();
    for (;;) {
        struct gpu *gpu = handle ? gpu_of(state, handle) : NULL;
        long delay = gpu ? rule_for(&gpu->delays, function) : 0;
        if (!delay) delay = rule_for(&state->delays, function);
        if (!delay || (delay > 0 && milliseconds() - begun >= delay)) return;
        nanosleep(&moment, NULL);
        load(state);
    }
}

/* What a session has lost, it may not find again: the next one does. */
static int fault_of(const struct gpu *gpu, const char *function, void *handle)
{
    int *lost = &lost_in[((uintptr_t)handle & 0xffff) - 1];
    int fault = (int)rule_for(&gpu->faults, function);
    if (fault == CRASH) raise(SIGSEGV);
    if (fault == GPU_IS_LOST) *lost = sessions;
    return gpu->stays_lost && *lost == sessions ? GPU_IS_LOST : fault;
}

/* Load the state, wait, and return the failure that this call shall have, if any. */
static int enter(struct state *state, const char *function, void *handle, struct gpu **gpu)
{
    load(state);
    note(state, function, handle ? gpu_of(state, handle) : NULL);
    wait_out(state, function, handle);
    long fault = rule_for(&state->faults, function);
    if (fault == CRASH) raise(SIGSEGV);
    if (fault) return (int)fault;
    int mischance = draw_mischance(state);
    if (mischance) return mischance;
    if (state->driver[0] && strcmp(state->driver, VERSION)) return MISMATCH;
    if (strncmp(function, "nvmlInit", 8) && !started) return UNINITIALIZED;
    if (!gpu) return SUCCESS;
    *gpu = gpu_of(state, handle);
    return *gpu ? fault_of(*gpu, function, handle) : INVALID_ARGUMENT;
}

static int note_failure(struct state *state, const char *function, void *handle, int code)
{
    struct gpu *gpu = handle ? gpu_of(state, handle) : NULL;
    note_told(state, function, gpu ? gpu->uuid : "-", code, 0);
    return code;
}

#define ENTER(handle, gpu)                                         \
    struct state state;                                            \
    do {                                                           \
        int failure = enter(&state, __func__, (handle), (gpu));    \
        if (failure) return note_failure(&state, __func__, (handle), failure); \
    } while (0)

static int copy_text(char *to, unsigned int size, const char *from)
{
    if (strlen(from) >= size) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

/* ---- the library ---- */

int nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    ENTER(NULL, NULL);
    pthread_mutex_lock(&lock);
    if (!started++) sessions++;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void)
{
    ENTER(NULL, NULL);
    pthread_mutex_lock(&lock);
    started--;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

const char *nvmlErrorString(int code)
{
    static __thread char text[TEXT];
    snprintf(text, TEXT, "stand-in error %d", code);
    return text;
}

int nvmlSystemGetDriverVersion(char *version, unsigned int size)
{
    ENTER(NULL, NULL);
    return copy_text(version, size, VERSION);
}

int nvmlDeviceGetCount_v2(unsigned int *count)
{
    ENTER(NULL, NULL);
    *count = (unsigned int)state.count;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle)
{
    ENTER(NULL, NULL);
    if (index >= (unsigned int)state.count) return INVALID_ARGUMENT;
    long fault = rule_for(&state.gpu[index].faults, __func__);
    if (fault) return (int)fault;
    *handle = handle_of(state.gpu[index].uuid);
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned int size)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    return copy_text(uuid, size, gpu->uuid);
}

int nvmlDeviceGetName(void *handle, char *name, unsigned int size)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    return copy_text(name, size, gpu->name);
}

int nvmlDeviceGetMinorNumber(void *handle, unsigned int *minor)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    *minor = (unsigned int)gpu->minor;
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *pci)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    memset(pci, 0, sizeof *pci);
    if (sscanf(gpu->bus, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device) != 3) return NOT_SUPPORTED;
    snprintf(pci->bus_id, sizeof pci->bus_id, "%s", gpu->bus);
    snprintf(pci->legacy, sizeof pci->legacy, "%04X:%02X:%02X.0", pci->domain & 0xffff, pci->bus & 0xff, pci->device & 0xff);
    return SUCCESS;
}

/* The first version counts what the driver holds back as used. */
int nvmlDeviceGetMemoryInfo(void *handle, struct memory_v1 *memory)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    memory->total = gpu->total;
    memory->used = gpu->used + gpu->reserved;
    memory->available = gpu->total - memory->used;
    note_told(&state, __func__, gpu->uuid, SUCCESS, gpu->used);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *memory)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    if (memory->version != (sizeof *memory | 2u << 24)) return 25;
    memory->total = gpu->total;
    memory->reserved = gpu->reserved;
    memory->used = gpu->used;
    memory->available = gpu->total - gpu->used - gpu->reserved;
    note_told(&state, __func__, gpu->uuid, SUCCESS, gpu->used);
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *handle, struct utilization *rates)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    if (gpu->parent) return NOT_SUPPORTED;
    rates->gpu = rates->memory = (unsigned int)gpu->utilization;
    return SUCCESS;
}

int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned int *temperature)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    if (gpu->parent) return NOT_SUPPORTED;
    if (sensor) return INVALID_ARGUMENT;
    *temperature = (unsigned int)gpu->temperature;
    return SUCCESS;
}

struct temperature { unsigned int version; int sensor; int celsius; };

int nvmlDeviceGetTemperatureV(void *handle, struct temperature *answer)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    if (gpu->parent) return NOT_SUPPORTED;
    if (answer->version != 0x100000C || answer->sensor) return INVALID_ARGUMENT;
    answer->celsius = gpu->temperature;
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned int *milliwatts)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    if (gpu->parent) return NOT_SUPPORTED;
    *milliwatts = (unsigned int)gpu->power;
    return SUCCESS;
}

int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned int *milliwatts)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    if (gpu->parent) return NOT_SUPPORTED;
    *milliwatts = (unsigned int)gpu->power_limit;
    return SUCCESS;
}

int nvmlDeviceGetPowerManagementLimit(void *handle, unsigned int *milliwatts)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    if (gpu->parent) return NOT_SUPPORTED;
    *milliwatts = (unsigned int)gpu->power_limit;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(void *handle, unsigned int *current, unsigned int *pending)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    *current = *pending = (unsigned int)gpu->mig;
    return SUCCESS;
}

/* ---- processes ---- */

static void put_process(unsigned char *at, size_t size, const struct process *process)
{
    struct process_long all = {{process->pid, process->memory, 0xffffffffu, 0xffffffffu}, 0};
    struct process_v1 first = {process->pid, process->memory};
    if (size == sizeof first) memcpy(at, &first, size);
    else memcpy(at, &all, size);
}

static int list(const struct gpu *gpu, int kind, unsigned int *count, void *records, size_t size)
{
    unsigned int room = *count, found = 0;
    for (int i = 0; i < gpu->count; i++) found += gpu->process[i].kind == kind;
    *count = found;
    if (!found) return SUCCESS;
    if (room < found) return INSUFFICIENT_SIZE;
    if (!records) return INVALID_ARGUMENT;
    unsigned char *at = records;
    for (int i = 0; i < gpu->count; i++) {
        if (gpu->process[i].kind != kind) continue;
        put_process(at, size, &gpu->process[i]);
        at += size;
    }
    return SUCCESS;
}

#define LISTS(function, kind, size)                                       \
    int function(void *handle, unsigned int *count, void *records)        \
    {                                                                     \
        struct gpu *gpu;                                                  \
        ENTER(handle, &gpu);                                              \
        return list(gpu, kind, count, records, size);                     \
    }

#define NEWEST (gpu->long_records ? sizeof(struct process_long) : sizeof(struct process_v2))

LISTS(nvmlDeviceGetComputeRunningProcesses, COMPUTE, sizeof(struct process_v1))
LISTS(nvmlDeviceGetComputeRunningProcesses_v2, COMPUTE, sizeof(struct process_v2))
LISTS(nvmlDeviceGetComputeRunningProcesses_v3, COMPUTE, NEWEST)
LISTS(nvmlDeviceGetGraphicsRunningProcesses, GRAPHICS, sizeof(struct process_v1))
LISTS(nvmlDeviceGetGraphicsRunningProcesses_v2, GRAPHICS, sizeof(struct process_v2))
LISTS(nvmlDeviceGetGraphicsRunningProcesses_v3, GRAPHICS, NEWEST)

/* The binding asks with no room first. Where nothing computed of late, that is an error of its own. */
int nvmlDeviceGetProcessUtilization(void *handle, struct sample *samples, unsigned int *count,
                                    unsigned long long last_seen)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    unsigned int room = *count;
    if (gpu->parent || gpu->mig) return NOT_SUPPORTED;
    if (last_seen || !gpu->sample_count) return NOT_FOUND;
    *count = (unsigned int)gpu->sample_count;
    if (!samples || room < *count) return INSUFFICIENT_SIZE;
    memcpy(samples, gpu->sample, sizeof *samples * *count);
    return SUCCESS;
}

/* ---- health ----
 *
 * The state names every XID that a GPU has had since the driver was loaded. An event set tells those
 * that came after a GPU was registered in it, as the real one does.
 */

enum { XID_EVENT = 8, MOST_SETS = 256 };
enum { RECOVERY_ACTION = 230, UNSIGNED_INT = 1 };
struct field_value {
    unsigned int field, scope;
    long long at, latency;
    int type, result;
    union { unsigned int number; unsigned long long all; } value;
};
struct event_data {
    void *device;
    unsigned long long kind, data;
    unsigned int gi, ci;
};
struct event_set { int used, session, told; void *device; };
static struct event_set event_sets[MOST_SETS];

int nvmlEventSetCreate(void **set)
{
    ENTER(NULL, NULL);
    for (int i = 0; i < MOST_SETS; i++)
        if (!event_sets[i].used) {
            event_sets[i] = (struct event_set){1, sessions, 0, NULL};
            *set = &event_sets[i];
            return SUCCESS;
        }
    return INSUFFICIENT_SIZE;
}

int nvmlEventSetFree(void *set)
{
    ENTER(NULL, NULL);
    struct event_set *events = set;
    /* The real library would do anything at all with a set of an earlier session. */
    if (!events->used || events->session != sessions) abort();
    events->used = 0;
    return SUCCESS;
}

int nvmlDeviceGetSupportedEventTypes(void *handle, unsigned long long *kinds)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    *kinds = XID_EVENT;
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(void *handle, unsigned long long kinds, void *set)
{
    struct gpu *gpu;
    struct event_set *events = set;
    ENTER(handle, &gpu);
    if (kinds != XID_EVENT) return NOT_SUPPORTED;
    events->device = handle;
    events->told = gpu->xid_count;
    return SUCCESS;
}

int nvmlEventSetWait_v2(void *set, struct event_data *data, unsigned int within_ms)
{
    struct event_set *events = set;
    if (!events->used || events->session != sessions) abort();
    ENTER(events->device, NULL);
    struct gpu *gpu = gpu_of(&state, events->device);
    if (!gpu || events->told >= gpu->xid_count) {
        const struct timespec moment = {within_ms / 1000, (long)(within_ms % 1000) * 1000000};
        nanosleep(&moment, NULL);
        return TIMED_OUT;
    }
    int before = events->told++, run = 0;
    while (before >= gpu->xid_run[run].times) before -= gpu->xid_run[run++].times;
    long code = gpu->xid_run[run].code;
    *data = (struct event_data){events->device, XID_EVENT, (unsigned long long)code, ~0u, ~0u};
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(void *handle, int kind, int counter, unsigned long long *count)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    if (gpu->ecc < 0) return NOT_SUPPORTED;
    *count = kind == 1 && counter == 0 ? (unsigned long long)gpu->ecc : 0;
    return SUCCESS;
}

int nvmlDeviceGetRemappedRows(void *handle, unsigned int *corrected, unsigned int *uncorrected,
                              unsigned int *pending, unsigned int *failed)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    if (gpu->remap_pending < 0) return NOT_SUPPORTED;
    *corrected = *uncorrected = 0;
    *pending = (unsigned int)gpu->remap_pending;
    *failed = (unsigned int)gpu->remap_failed;
    return SUCCESS;
}

int nvmlDeviceGetFieldValues(void *handle, int count, struct field_value *values)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    for (int i = 0; i < count; i++) {
        int known = values[i].field == RECOVERY_ACTION && gpu->recovery >= 0;
        values[i].result = known ? SUCCESS : NOT_SUPPORTED;
        values[i].type = UNSIGNED_INT;
        if (known) values[i].value.number = (unsigned int)gpu->recovery;
    }
    return SUCCESS;
}

int nvmlDeviceGetRetiredPagesPendingStatus(void *handle, unsigned int *pending)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    if (gpu->pages_pending < 0) return NOT_SUPPORTED;
    *pending = (unsigned int)gpu->pages_pending;
    return SUCCESS;
}

/* ---- MIG ---- */

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned int *count)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    *count = gpu->mig ? MOST_PARTS : 0;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned int index, void **part)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    if (!gpu->mig || index >= MOST_PARTS) return INVALID_ARGUMENT;
    if (index >= (unsigned int)gpu->parts) return NOT_FOUND;
    if (!strcmp(gpu->part[index].uuid, "-")) return NOT_FOUND;
    *part = handle_of(gpu->part[index].uuid);
    return SUCCESS;
}

/* ---- how a GPU is set up ---- */

int nvmlSystemGetNVMLVersion(char *version, unsigned int size)
{
    ENTER(NULL, NULL);
    return copy_text(version, size, "13." VERSION);
}

int nvmlDeviceGetEccMode(void *handle, unsigned int *current, unsigned int *pending)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    if (gpu->ecc < 0) return NOT_SUPPORTED;
    *current = *pending = 1;
    return SUCCESS;
}

int nvmlDeviceGetPersistenceMode(void *handle, unsigned int *mode)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    *mode = 1;
    return SUCCESS;
}

int nvmlDeviceGetComputeMode(void *handle, unsigned int *mode)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    *mode = (unsigned int)gpu->compute_mode;
    return SUCCESS;
}

/* ---- memory limits on cgroups, kept in a file of lines: UUID, soft, hard, directory ---- */

#define NO_LIMIT 0xffffffffffffffffull

static pthread_mutex_t limits_lock = PTHREAD_MUTEX_INITIALIZER;

static unsigned long long in_steps(const struct gpu *gpu, unsigned long long size)
{
    unsigned long long step = (unsigned long long)labs(gpu->step);
    if (size == NO_LIMIT || !step) return size;
    return (gpu->step < 0 ? (size + step - 1) / step : size / step) * step;
}

/* Copy all lines but that of one cgroup and GPU, which is returned. */
static struct set_limits other_limits(const char *from, FILE *to, const char *uuid, const char *name)
{
    struct set_limits found = {name, 0, NO_LIMIT}, each;
    char line[2048], of[TEXT];
    int begin;
    FILE *file = fopen(from, "re");
    while (file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        if (sscanf(line, "%95s %llu %llu %n", of, &each.soft, &each.hard, &begin) != 3) continue;
        if (!strcmp(of, uuid) && !strcmp(line + begin, name)) {
            found.soft = each.soft;
            found.hard = each.hard;
        } else if (to) fprintf(to, "%s\n", line);
    }
    if (file) fclose(file);
    return found;
}

static int is_cgroup(const char *name)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/cgroup.procs", name);
    return !access(path, F_OK);
}

int nvmlDeviceSetMemoryLimits_v1(void *handle, const struct set_limits *limits)
{
    struct gpu *gpu;
    char fresh[520];
    ENTER(handle, &gpu);
    if (gpu->mig) return NOT_SUPPORTED;
    if (!is_cgroup(limits->name_space) || limits->soft > limits->hard) return INVALID_ARGUMENT;
    if (!gpu->step) return SUCCESS;
    pthread_mutex_lock(&limits_lock);
    snprintf(fresh, sizeof fresh, "%s.new", state.limits);
    FILE *file = fopen(fresh, "we");
    other_limits(state.limits, file, gpu->uuid, limits->name_space);
    unsigned long long soft = in_steps(gpu, limits->soft), hard = in_steps(gpu, limits->hard);
    if (soft || hard != NO_LIMIT)
        fprintf(file, "%s %llu %llu %s\n", gpu->uuid, soft, hard, limits->name_space);
    fclose(file);
    int failed = rename(fresh, state.limits);
    pthread_mutex_unlock(&limits_lock);
    return failed ? UNKNOWN : SUCCESS;
}

int nvmlDeviceGetMemoryLimits_v1(void *handle, struct get_limits *limits)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    if (gpu->mig) return NOT_SUPPORTED;
    if (!is_cgroup(limits->name_space)) return INVALID_ARGUMENT;
    pthread_mutex_lock(&limits_lock);
    struct set_limits found = other_limits(state.limits, NULL, gpu->uuid, limits->name_space);
    pthread_mutex_unlock(&limits_lock);
    limits->soft = found.soft;
    limits->hard = found.hard;
    limits->used = 0;
    return SUCCESS;
}

/* ---- links and sockets ---- */

int nvmlDeviceGetNvLinkState(void *handle, unsigned int link, unsigned int *active)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    if (!gpu->links) return NOT_SUPPORTED;
    if (link >= (unsigned int)gpu->links) return INVALID_ARGUMENT;
    *active = strcmp(gpu->link[link], "-") != 0;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned int link, struct pci *pci)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    if (link >= (unsigned int)gpu->links) return INVALID_ARGUMENT;
    memset(pci, 0, sizeof *pci);
    snprintf(pci->bus_id, sizeof pci->bus_id, "%.31s", gpu->link[link]);
    return SUCCESS;
}

/* Two GPUs reach each other where a link of one ends at the other, or both at a switch. */
int nvmlDeviceGetP2PStatus(void *handle, void *other, int kind, int *status)
{
    enum { OK = 0, NVLINK = 2, NONE = 5 };
    struct gpu *gpu;
    ENTER(handle, &gpu);
    struct gpu *second = gpu_of(&state, other);
    if (!second) return INVALID_ARGUMENT;
    *status = NONE;
    for (int i = 0; kind == NVLINK && i < gpu->links; i++)
        for (int j = 0; j < second->links; j++)
            if (!strcmp(gpu->link[i], second->bus)
                || (strcmp(gpu->link[i], "-") && !strcmp(gpu->link[i], second->link[j])))
                *status = OK;
    return SUCCESS;
}

int nvmlDeviceGetTopologyCommonAncestor(void *handle, void *other, int *level)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    struct gpu *second = gpu_of(&state, other);
    if (!second) return INVALID_ARGUMENT;
    if (second - state.gpu >= gpu->ancestors) return NOT_SUPPORTED;
    *level = gpu->ancestor[second - state.gpu];
    return SUCCESS;
}

int nvmlDeviceGetMemoryAffinity(void *handle, unsigned int size, unsigned long *nodes, int scope)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    if (!gpu->nodes) return NOT_SUPPORTED;
    if (!size || scope) return INVALID_ARGUMENT;
    memset(nodes, 0, size * sizeof *nodes);
    nodes[0] = gpu->nodes;
    return SUCCESS;
}

int nvmlDeviceGetCpuAffinity(void *handle, unsigned int size, unsigned long *cpus)
{
    struct gpu *gpu;
    ENTER(handle, &gpu);
    if (!gpu->cpus) return NOT_SUPPORTED;
    memset(cpus, 0, size * sizeof *cpus);
    cpus[0] = gpu->cpus;
    return SUCCESS;
}
