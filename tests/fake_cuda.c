/* Stands in for CUDA's runtime and libraries, so that torch finds a GPU where there is none (unit/test_fake_cuda.py).

   Nothing is computed. Kernels are not launched, and what is copied to the host is 0 if it is one number, else 0x40 in
   all bytes (3.0 in float32, 32.5 in float64). But all of torch's own code runs: it refuses tensors on two devices,
   formats that a kernel does not have and, after torch.cuda.set_sync_debug_mode("error"), whatever waits for the device.
   A stream that is captured refuses to be waited for, as on a GPU.

   Loaded before torch, by LD_PRELOAD. As it has the driver's soname, the loader does not look for the driver. Functions
   that are not here return 0, for success. */

#include <driver_types.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <vector_types.h>

#define GIB ((size_t)1 << 30)
/* A function that sets what its arguments point to, and succeeds. */
#define GIVES(name, arguments, setting) int name arguments { setting; return 0; }
#define MAKES(name, handle, ...) GIVES(name, (__VA_ARGS__), *(void **)handle = calloc(1, 256))

/* The device, seen unless CUDA_VISIBLE_DEVICES is empty. */

int cudaGetDeviceCount(int *count) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    *count = !visible || *visible;
    return *count ? cudaSuccess : cudaErrorNoDevice;
}

GIVES(cudaGetDevice, (int *device), *device = 0)
GIVES(cudaDriverGetVersion, (int *version), *version = 13020)
GIVES(cudaRuntimeGetVersion, (int *version), *version = 13020)
GIVES(cudaDeviceGetAttribute, (int *value, int name, int device), *value = 1)
GIVES(cudaOccupancyMaxActiveBlocksPerMultiprocessor, (int *blocks, void *kernel, int threads, size_t bytes), *blocks = 1)
GIVES(cudaMemGetInfo, (size_t *free, size_t *total), *free = GIB; *total = 80 * GIB)
GIVES(cuDevicePrimaryCtxGetState, (int device, unsigned *flags, int *active), *flags = 0; *active = 1)
MAKES(cuCtxGetCurrent, context, void *context)

const char *cudaGetErrorName(int error) { return "fake_cuda"; }
const char *cudaGetErrorString(int error) {
    return error == cudaErrorStreamCaptureUnsupported ? "a captured stream was waited for" : "refused";
}

int cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    memset(found, 0, sizeof *found);
    strcpy(found->name, "a stand-in");
    found->major = 9;
    found->warpSize = 32;
    found->totalGlobalMem = 80 * GIB;
    found->multiProcessorCount = found->maxBlocksPerMultiProcessor = 32;
    found->maxThreadsPerBlock = found->maxThreadsDim[0] = 1024;
    found->maxThreadsPerMultiProcessor = 2048;
    found->maxGridSize[0] = found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->regsPerMultiprocessor = found->sharedMemPerMultiprocessor = 65536;
    found->sharedMemPerBlock = 49152;
    found->sharedMemPerBlockOptin = 232448;
    return cudaSuccess;
}

int cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->binaryVersion = found->ptxVersion = 90;
    return cudaSuccess;
}

/* Memory. What is pinned is remembered, for torch asks. */

static struct { char *start; size_t bytes; } pinned[4096];
static pthread_mutex_t pinning = PTHREAD_MUTEX_INITIALIZER;

int cudaMalloc(void **start, size_t bytes) {
    /* cuDNN's search takes all that is free, or tries without. */
    return bytes <= GIB && (*start = calloc(1, bytes)) ? cudaSuccess : cudaErrorMemoryAllocation;
}

int cudaFree(void *start) {
    free(start);
    return cudaSuccess;
}

int cudaHostAlloc(void **start, size_t bytes, unsigned flags) {
    *start = calloc(1, bytes);
    pthread_mutex_lock(&pinning);
    int i = 0;
    while (i < 4095 && pinned[i].start) i++;
    pinned[i].start = *start;
    pinned[i].bytes = bytes;
    pthread_mutex_unlock(&pinning);
    return cudaSuccess;
}

int cudaPointerGetAttributes(struct cudaPointerAttributes *found, char *address) {
    memset(found, 0, sizeof *found);
    for (int i = 0; i < 4096; i++)
        if (pinned[i].start && (size_t)(address - pinned[i].start) < pinned[i].bytes) found->type = cudaMemoryTypeHost;
    return cudaSuccess;
}

int cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, void *stream) {
    if (kind == cudaMemcpyDeviceToHost) memset(to, bytes > 8 ? 0x40 : 0, bytes);
    return cudaSuccess;
}

/* Streams, events, graphs. */

static void *captured;
static unsigned long long captures;

MAKES(cudaStreamCreateWithPriority, stream, void *stream, unsigned flags, int priority)
MAKES(cudaEventCreateWithFlags, event, void *event, unsigned flags)
MAKES(cudaEventCreate, event, void *event)
MAKES(cudaGraphInstantiate, made, void *made, void *graph, unsigned long long flags)
MAKES(cudaGraphInstantiateWithFlags, made, void *made, void *graph, unsigned long long flags)
GIVES(cudaEventElapsedTime, (float *ms, void *from, void *to), *ms = 1)
GIVES(cudaGraphGetNodes, (void *graph, void **nodes, size_t *count), *count = 1)
GIVES(cudaStreamBeginCapture, (void *stream, int mode), captured = stream; captures++)
GIVES(cudaStreamEndCapture, (void *stream, void **graph), captured = NULL; *graph = calloc(1, 256))
GIVES(cudaStreamIsCapturing, (void *stream, int *status), *status = captured && captured == stream)

int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id, void **graph, void **nodes, void **edges,
                             size_t *count) {
    if (id) *id = captures;
    if (count) *count = 0;
    return cudaStreamIsCapturing(stream, status);
}

int cudaStreamSynchronize(void *stream) {
    return captured && captured == stream ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

int cudaDeviceSynchronize(void) { return captured ? cudaErrorStreamCaptureUnsupported : cudaSuccess; }

/* What the next kernel is launched with. */

static _Thread_local struct { dim3 grid, block; size_t bytes; void *stream; } next;

GIVES(__cudaPushCallConfiguration, (dim3 grid, dim3 block, size_t bytes, void *stream),
      next.grid = grid; next.block = block; next.bytes = bytes; next.stream = stream)
GIVES(__cudaPopCallConfiguration, (dim3 *grid, dim3 *block, size_t *bytes, void **stream),
      *grid = next.grid; *block = next.block; *bytes = next.bytes; *stream = next.stream)

/* cuBLAS, cuDNN, NCCL. */

MAKES(cublasCreate_v2, handle, void *handle)
GIVES(cublasLtMatmulAlgoGetHeuristic,
      (void *handle, void *product, void *a, void *b, void *c, void *d, void *wanted, int most, void *found, int *count),
      *count = 1)
MAKES(cudnnCreate, handle, void *handle)
MAKES(cudnnCreateTensorDescriptor, made, void *made)
MAKES(cudnnBackendCreateDescriptor, made, int type, void *made)
GIVES(cudnnGetProperty, (int type, int *value), *value = type ? 26 : 9)
size_t cudnnGetVersion(void) { return 92600; }

/* One engine, without notes (types 11 and 19) and without workspace (type 3 is a long number, 15 a descriptor). */
GIVES(cudnnBackendGetAttribute, (void *of, int name, int type, int64_t asked, int64_t *count, void *values),
      if (count) *count = type != 11 && type != 19;
      if (asked && values && type != 15) memset(values, 0, type == 3 ? 8 : 4))

#define BATCH_NORM(size, ...) \
    GIVES(cudnnGetBatchNormalization##size##Size, (void *handle, int mode, int fused, __VA_ARGS__, size_t *bytes), *bytes = 0)
BATCH_NORM(ForwardTrainingExWorkspace, void *x, void *z, void *y, void *weights, void *activation)
BATCH_NORM(BackwardExWorkspace, void *x, void *y, void *dy, void *dz, void *dx, void *weights, void *activation)
BATCH_NORM(TrainingExReserveSpace, void *activation, void *x)

GIVES(ncclGetVersion, (int *version), *version = 22800)
GIVES(ncclCommGetAsyncError, (void *ranks, int *error), *error = 0)
MAKES(ncclCommInitRankConfig, made, void *made, int ranks, struct { char bytes[128]; } id, int rank, void *how)
MAKES(ncclCommSplit, made, void *ranks, int color, int key, void *made, void *how)
