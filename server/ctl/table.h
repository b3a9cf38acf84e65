/*
 * Table: cells collected row by row, printed with aligned columns; and the units that people read.
 *
 * Control characters of a cell are printed as '?': names and file contents come from others, and a terminal
 * obeys them. A table that runs out of memory prints what it has and says so. One thread.
 */
#ifndef SERVER_CTL_TABLE_H
#define SERVER_CTL_TABLE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "core/error.h"

#define SRV_TABLE_COLUMNS_MAX 20u
#define SRV_TABLE_CELL_BYTES  160u /* longer cells are cut */

struct srv_table {
	const char *const *titles; /* [n_columns]; a title that begins with '<' aligns its column left */
	uint32_t n_columns;
	uint32_t n_cells;
	uint32_t n_cells_max;
	char (*cells)[SRV_TABLE_CELL_BYTES];
	bool is_truncated;
};

/* `titles` are borrowed. */
void srv_table_init(struct srv_table *table, const char *const titles[], uint32_t n_columns);
void srv_table_finish(struct srv_table *table);
/* The next cell, row by row. */
void srv_table_cell(struct srv_table *table, const char *fmt, ...) KV_PRINTF(2, 3);
void srv_table_print(const struct srv_table *table, FILE *out);

#define SRV_HUMAN_BYTES 24u
/* "17 B", "1.44 MiB". Returns `text`. */
const char *srv_human_bytes(uint64_t n_bytes, char text[static SRV_HUMAN_BYTES]);
/* "870 ns", "12.3 us", "4.56 ms", "1.23 s". */
const char *srv_human_ns(uint64_t ns, char text[static SRV_HUMAN_BYTES]);
/* "870 ms", "12.3 s", "4 min", "3.2 h", "12 d". */
const char *srv_human_ms(uint64_t ms, char text[static SRV_HUMAN_BYTES]);
/* A tenant: a user id with the name that this machine knows it by, "1000 (anna)"; else as it is. */
const char *srv_human_tenant(const char *tenant, char text[static SRV_TABLE_CELL_BYTES]);
/* Replaces control characters. Returns `text`. */
char *srv_printable(char *text);

#endif
