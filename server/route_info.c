/* GET /v1/info: what runs, and why it was chosen. */
#include "core/checked.h"
#include "server/http_views.h"

void srv_view_info(const struct srv_control *control, struct srv_text *text)
{
	const struct srv_info *info = &control->info;

	srv_text_open(text, NULL, '{');
	srv_text_string(text, "version", info->version);
	srv_text_string(text, "commit", info->commit);
	srv_text_hex_id(text, "boot_id", info->boot_id);
	srv_text_u64(text, "pid", info->pid);
	srv_text_u64(text, "uptime_ms", info->uptime_ms);
	srv_text_string(text, "backend", info->backend);
	srv_text_string(text, "backend_reason", info->backend_reason);
	srv_text_string(text, "device", info->device.device);
	srv_text_string(text, "instruction_set", info->device.instruction_set);
	srv_text_u64(text, "arena_bytes", info->device.memory_bytes);
	srv_text_u64(text, "n_threads", info->device.n_threads);
	srv_text_string(text, "io", info->io);
	srv_text_string(text, "io_reason", info->io_reason);
	srv_text_u64(text, "frame_bytes_max", info->frame_bytes_max);
	srv_text_open(text, "listeners", '[');
	for (uint32_t i = 0; i < info->n_listeners && i < KV_LENGTH(info->listeners); i++)
		srv_text_string(text, NULL, info->listeners[i]);
	srv_text_close(text, ']');
	srv_text_close(text, '}');
}
