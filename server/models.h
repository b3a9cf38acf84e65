/*
 * Models by name: the geometry of the K/V caches of models that many people run, so that planning needs
 * no look into a model's configuration. Numbers are those of the config.json that each model is published
 * with: num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim (hidden_size /
 * num_attention_heads where it has none). Constants; any thread.
 */
#ifndef SERVER_MODELS_H
#define SERVER_MODELS_H

#include <stdint.h>

struct srv_model {
	const char *name;
	uint32_t n_layers, q_heads, kv_heads, head_dim;
};

extern const struct srv_model srv_models[];
extern const uint32_t srv_models_length;

/* NULL when it is not known. Neither case matters nor what stands before a '/', nor "-Instruct" and its like.
 */
const struct srv_model *srv_model_find(const char *name);

#endif
