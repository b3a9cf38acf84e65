/*
 * Files that are served as they lie in the source tree, compiled in by server/embed_files.py: the dashboard's
 * page, style and script, and the description of the control API. Constants; any thread.
 */
#ifndef SERVER_EMBEDDED_H
#define SERVER_EMBEDDED_H

#include <stddef.h>

struct srv_embedded_file {
	const char *name;
	const unsigned char *bytes; /* a zero byte follows */
	size_t n_bytes;
};

extern const struct srv_embedded_file srv_embedded_files[];
extern const unsigned srv_embedded_files_length;

/* NULL when there is no such file. */
const struct srv_embedded_file *srv_embedded_find(const char *name);

#endif
