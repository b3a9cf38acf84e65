/*
 * Fuzz target: bytes as a safetensors file and, when they are one, as a capture. Every byte that a tensor
 * points at is read, so that an offset beyond the input is a crash under the address sanitizer.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "core/memory.h"
#include "server/ctl/capture.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

/* Bounds the work of one input: a shape of many tokens of one number is still linear. */
#define VALUES_MAX 65536u

static void read_tensors(const struct srv_safetensors *file)
{
	volatile uint8_t sum = 0;

	for (uint32_t i = 0; i < file->n_tensors; i++) {
		const struct srv_tensor *tensor = &file->tensors[i];
		char shape[SRV_TENSOR_SHAPE_TEXT_BYTES];

		for (uint64_t at = 0; at < tensor->data_bytes; at++)
			sum = (uint8_t)(sum + tensor->data[at]);
		srv_tensor_shape_text(tensor, shape);
		if (srv_safetensors_find(file, tensor->name) != tensor)
			abort();
	}
	(void)srv_safetensors_metadata(file, "model");
}

static void read_capture(const struct srv_capture *capture)
{
	for (uint32_t i = 0; i < capture->n_layers; i++)
		for (uint32_t kind = 0; kind < SRV_CAPTURE_N_KINDS; kind++) {
			const uint64_t n_values = (uint64_t)capture->n_tokens *
				srv_capture_token_values(capture, (enum srv_capture_kind)kind);
			float *values =
				n_values <= VALUES_MAX ? malloc((size_t)n_values * sizeof(*values)) : NULL;

			if (values)
				srv_capture_load(capture, i, (enum srv_capture_kind)kind, 0,
					capture->n_tokens, values);
			free(values);
		}
	(void)srv_capture_is_bf16(capture);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
	struct srv_safetensors *file = NULL;
	struct srv_capture *capture = NULL;
	struct kv_error err = { .status = KV_OK };
	/* A copy of exactly this size, so that one byte too many is seen. */
	uint8_t *bytes = malloc(n_bytes == 0 ? 1 : n_bytes);

	if (!bytes)
		return 0;
	if (n_bytes > 0)
		memcpy(bytes, data, n_bytes);
	if (srv_safetensors_create(bytes, n_bytes, &file, &err) == KV_OK) {
		read_tensors(file);
		if (srv_capture_create(file, &capture, &err) == KV_OK) {
			read_capture(capture);
			if (srv_capture_check_finite(capture, &err) != KV_OK && err.msg[0] == '\0')
				abort();
			srv_capture_destroy(capture);
		}
	} else if (err.msg[0] == '\0') {
		abort(); /* every refusal says why */
	}
	free(bytes);
	return 0;
}
