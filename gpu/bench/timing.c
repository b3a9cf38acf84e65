/* Graphs of kept launches, replayed and timed by events. */
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

#include "gpu/bench/bench.h"

#define N_REPLAYS    14u
#define N_WARM       4u
#define SUSTAINED_MS 500.0

static void check(cudaError_t error, const char *what)
{
	if (error != cudaSuccess)
		kvg_bench_die("%s: %s", what, cudaGetErrorString(error));
}

/* ---- graphs ---- */

static void launch_wave(const struct kvg_decode_params *kept, enum kvg_bench_part part, cudaStream_t stream)
{
	struct kvg_decode_params wave = *kept;

	wave.is_dependent = part == KVG_BENCH_PAIR || part == KVG_BENCH_ALL;
	if (part != KVG_BENCH_ALONE)
		check(kvg_decode_prepare_launch(&wave, stream), "prepare");
	if (part != KVG_BENCH_PREPARE)
		check(wave.k_bits != 0 ? kvg_decode_tiles_launch(&wave, stream)
				       : kvg_decode_rows_launch(&wave, stream),
			"attention");
	if (part == KVG_BENCH_ALL) {
		check(kvg_decode_exact_launch(&wave, stream), "ring blocks");
		check(kvg_decode_finish_launch(&wave, stream), "finish");
	}
}

struct graph {
	cudaGraphExec_t exec;
	cudaEvent_t begin, end;
	cudaStream_t stream;
};

static void graph_begin(struct graph *graph)
{
	graph->stream = kvg_bench_cuda()->compute_stream;
	check(cudaEventCreate(&graph->begin), "event");
	check(cudaEventCreate(&graph->end), "event");
	check(cudaStreamBeginCapture(graph->stream, cudaStreamCaptureModeGlobal), "capture");
}

static void graph_end(struct graph *graph)
{
	cudaGraph_t captured;

	check(cudaStreamEndCapture(graph->stream, &captured), "capture");
	check(cudaGraphInstantiate(&graph->exec, captured, 0), "graph");
	check(cudaGraphDestroy(captured), "graph");
}

static void graph_destroy(struct graph *graph)
{
	check(cudaEventDestroy(graph->begin), "event");
	check(cudaEventDestroy(graph->end), "event");
	check(cudaGraphExecDestroy(graph->exec), "graph");
}

static int by_value(const void *a, const void *b)
{
	return *(const float *)a < *(const float *)b ? -1 : *(const float *)a > *(const float *)b;
}

static double median_us(struct graph *graph, uint32_t n_each)
{
	float ms[N_REPLAYS];

	usleep(70000); /* the clock starts cool */
	for (uint32_t i = 0; i < N_REPLAYS; i++) {
		check(cudaEventRecord(graph->begin, graph->stream), "event");
		check(cudaGraphLaunch(graph->exec, graph->stream), "replay");
		check(cudaEventRecord(graph->end, graph->stream), "event");
		check(cudaEventSynchronize(graph->end), "replay");
		check(cudaEventElapsedTime(&ms[i], graph->begin, graph->end), "event");
	}
	qsort(ms + N_WARM, N_REPLAYS - N_WARM, sizeof(ms[0]), by_value);
	return (double)ms[N_WARM + (N_REPLAYS - N_WARM) / 2] * 1000.0 / n_each;
}

static void capture_waves(struct graph *graph, const struct kvg_bench_pool *pool, enum kvg_bench_part part)
{
	graph_begin(graph);
	for (uint32_t i = 0; i < pool->n_waves; i++)
		launch_wave(&pool->waves[i], part, graph->stream);
	graph_end(graph);
}

double kvg_bench_time(const struct kvg_bench_pool *pool, enum kvg_bench_part part)
{
	struct graph graph;

	capture_waves(&graph, pool, part);

	const double us = median_us(&graph, pool->n_waves);

	graph_destroy(&graph);
	return us;
}

double kvg_bench_time_update(const struct kvg_rows_params *params)
{
	struct graph graph;

	graph_begin(&graph);
	for (uint32_t i = 0; i < 8; i++)
		check(kvg_rows_launch(params, graph.stream), "update");
	graph_end(&graph);

	const double us = median_us(&graph, 8);

	graph_destroy(&graph);
	return us;
}

struct kvg_bench_sustained kvg_bench_sustain(const struct kvg_bench_pool *pool)
{
	struct kvg_bench_sustained out = { 0, 0, 0 };
	const double once_us = kvg_bench_time(pool, KVG_BENCH_ALONE) * pool->n_waves;
	const uint32_t n = (uint32_t)(SUSTAINED_MS * 1000.0 / once_us) + 1;
	struct graph graph;
	float ms = 0;

	capture_waves(&graph, pool, KVG_BENCH_ALONE);
	/* All replays wait in the stream, so nothing is between them; the second half is timed. */
	for (uint32_t i = 0; i < n; i++) {
		if (i == n / 2)
			check(cudaEventRecord(graph.begin, graph.stream), "event");
		check(cudaGraphLaunch(graph.exec, graph.stream), "replay");
	}
	check(cudaEventRecord(graph.end, graph.stream), "event");
	while (cudaEventQuery(graph.end) == cudaErrorNotReady)
		kvg_bench_device_state(&out.clock_mhz, &out.power_w);
	check(cudaEventElapsedTime(&ms, graph.begin, graph.end), "event");
	out.us = (double)ms * 1000.0 / (n - n / 2) / pool->n_waves;
	graph_destroy(&graph);
	return out;
}

/* ---- NVML: the few functions that are used, found at run time ---- */

struct nvml {
	int (*init)(void);
	int (*device)(unsigned, void **);
	int (*clock)(void *, int, unsigned *);
	int (*power)(void *, unsigned *);
	void *handle;
	bool is_ready;
};

static struct nvml load_nvml(void)
{
	struct nvml nvml = { 0 };
	void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);

	if (!library)
		return nvml;
	*(void **)&nvml.init = dlsym(library, "nvmlInit_v2");
	*(void **)&nvml.device = dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
	*(void **)&nvml.clock = dlsym(library, "nvmlDeviceGetClockInfo");
	*(void **)&nvml.power = dlsym(library, "nvmlDeviceGetPowerUsage");
	nvml.is_ready = nvml.init && nvml.device && nvml.clock && nvml.power && nvml.init() == 0 &&
		nvml.device(0, &nvml.handle) == 0;
	return nvml;
}

void kvg_bench_device_state(uint32_t *clock_mhz, uint32_t *power_w)
{
	enum { CLOCK_SM = 1 };
	static struct nvml nvml;
	static bool is_loaded;
	unsigned clock = 0, power_mw = 0;

	if (!is_loaded) {
		nvml = load_nvml();
		is_loaded = true;
	}
	if (!nvml.is_ready)
		return;
	if (nvml.clock(nvml.handle, CLOCK_SM, &clock) == 0)
		*clock_mhz = clock;
	if (nvml.power(nvml.handle, &power_mw) == 0)
		*power_w = power_mw / 1000;
}
