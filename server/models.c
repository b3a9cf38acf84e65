#include "server/models.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <strings.h>

#include "core/checked.h"

const struct srv_model srv_models[] = {
	{ "gemma-2-2b", 26, 8, 4, 256 },
	{ "gemma-2-9b", 42, 16, 8, 256 },
	{ "gemma-2-27b", 46, 32, 16, 128 },
	{ "gemma-3-1b", 26, 4, 1, 256 },
	{ "gemma-3-4b", 34, 8, 4, 256 },
	{ "gemma-3-12b", 48, 16, 8, 256 },
	{ "gemma-3-27b", 62, 32, 16, 128 },
	{ "gpt-oss-20b", 24, 64, 8, 64 },
	{ "gpt-oss-120b", 36, 64, 8, 64 },
	{ "llama-2-7b", 32, 32, 32, 128 },
	{ "llama-2-13b", 40, 40, 40, 128 },
	{ "llama-2-70b", 80, 64, 8, 128 },
	{ "llama-3.1-8b", 32, 32, 8, 128 },
	{ "llama-3.1-70b", 80, 64, 8, 128 },
	{ "llama-3.1-405b", 126, 128, 8, 128 },
	{ "llama-3.2-1b", 16, 32, 8, 64 },
	{ "llama-3.2-3b", 28, 24, 8, 128 },
	{ "llama-3.3-70b", 80, 64, 8, 128 },
	{ "mistral-7b", 32, 32, 8, 128 },
	{ "mistral-nemo-12b", 40, 32, 8, 128 },
	{ "mistral-small-24b", 40, 32, 8, 128 },
	{ "mixtral-8x7b", 32, 32, 8, 128 },
	{ "phi-3-mini", 32, 32, 32, 96 },
	{ "phi-4", 40, 40, 10, 128 },
	{ "qwen2.5-0.5b", 24, 14, 2, 64 },
	{ "qwen2.5-1.5b", 28, 12, 2, 128 },
	{ "qwen2.5-3b", 36, 16, 2, 128 },
	{ "qwen2.5-7b", 28, 28, 4, 128 },
	{ "qwen2.5-14b", 48, 40, 8, 128 },
	{ "qwen2.5-32b", 64, 40, 8, 128 },
	{ "qwen2.5-72b", 80, 64, 8, 128 },
	{ "qwen3-0.6b", 28, 16, 8, 128 },
	{ "qwen3-1.7b", 28, 16, 8, 128 },
	{ "qwen3-4b", 36, 32, 8, 128 },
	{ "qwen3-8b", 36, 32, 8, 128 },
	{ "qwen3-14b", 40, 40, 8, 128 },
	{ "qwen3-32b", 64, 64, 8, 128 },
	{ "qwen3-30b-a3b", 48, 32, 4, 128 },
	{ "qwen3-235b-a22b", 94, 64, 4, 128 },
	{ "smollm2-135m", 30, 9, 3, 64 },
	{ "smollm2-360m", 32, 15, 5, 64 },
	{ "smollm2-1.7b", 24, 32, 32, 64 },
};
const uint32_t srv_models_length = KV_LENGTH(srv_models);

/* What was done to a model after its training leaves its geometry as it is. */
static bool is_variant(const char *suffix)
{
	static const char *const known[] = { "", "-instruct", "-it", "-chat", "-base", "-hf", "-chat-hf" };

	for (size_t i = 0; i < KV_LENGTH(known); i++)
		if (strcasecmp(known[i], suffix) == 0)
			return true;
	return false;
}

const struct srv_model *srv_model_find(const char *name)
{
	const char *slash = strrchr(name, '/');

	if (slash)
		name = slash + 1;
	for (uint32_t i = 0; i < srv_models_length; i++) {
		const size_t n = strlen(srv_models[i].name);

		if (strncasecmp(srv_models[i].name, name, n) == 0 && is_variant(name + n))
			return &srv_models[i];
	}
	return NULL;
}
