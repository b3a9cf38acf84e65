#include "server/ctl/table.h"

#include <pwd.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "core/memory.h"

#define CELLS_FIRST 64u
/* 4096 rows of 16 columns: above every page of the API. */
#define CELLS_MAX (1u << 20)

void srv_table_init(struct srv_table *table, const char *const titles[], uint32_t n_columns)
{
	KV_ASSERT(n_columns > 0);
	KV_ASSERT(n_columns <= SRV_TABLE_COLUMNS_MAX);
	*table = (struct srv_table){ .titles = titles, .n_columns = n_columns };
}

void srv_table_finish(struct srv_table *table)
{
	kv_free(table->cells);
	*table = (struct srv_table){ 0 };
}

static bool grow(struct srv_table *table)
{
	const uint32_t n_cells_max = table->n_cells_max == 0 ? CELLS_FIRST : table->n_cells_max * 2;
	char(*cells)[SRV_TABLE_CELL_BYTES];

	if (n_cells_max > CELLS_MAX)
		return false;
	cells = kv_alloc(n_cells_max, sizeof(*cells));
	if (!cells)
		return false;
	if (table->cells)
		memcpy(cells, table->cells, table->n_cells * sizeof(*cells));
	kv_free(table->cells);
	table->cells = cells;
	table->n_cells_max = n_cells_max;
	return true;
}

void srv_table_cell(struct srv_table *table, const char *fmt, ...)
{
	va_list args;

	if (table->n_cells == table->n_cells_max && !grow(table)) {
		table->is_truncated = true;
		return;
	}
	va_start(args, fmt);
	vsnprintf(table->cells[table->n_cells], SRV_TABLE_CELL_BYTES, fmt, args);
	va_end(args);
	srv_printable(table->cells[table->n_cells]);
	table->n_cells++;
}

/* Characters of UTF-8 text: bytes that do not continue one. */
static uint32_t width_of(const char *text)
{
	uint32_t width = 0;

	for (; *text != '\0'; text++)
		width += ((unsigned char)*text & 0xC0) != 0x80;
	return width;
}

static bool is_left(const struct srv_table *table, uint32_t column)
{
	return table->titles[column][0] == '<';
}

static const char *title_of(const struct srv_table *table, uint32_t column)
{
	return table->titles[column] + is_left(table, column);
}

static void print_cell(
	const struct srv_table *table, uint32_t column, uint32_t column_width, const char *text, FILE *out)
{
	const bool is_last = column + 1 == table->n_columns;
	const uint32_t n_spaces = column_width - width_of(text);

	if (column > 0)
		fputs("  ", out);
	if (!is_left(table, column))
		fprintf(out, "%*s", (int)n_spaces, "");
	fputs(text, out);
	if (is_left(table, column) && !is_last)
		fprintf(out, "%*s", (int)n_spaces, "");
	if (is_last)
		fputc('\n', out);
}

void srv_table_print(const struct srv_table *table, FILE *out)
{
	uint32_t widths[SRV_TABLE_COLUMNS_MAX];
	const uint32_t n_rows = table->n_cells / table->n_columns;

	for (uint32_t column = 0; column < table->n_columns; column++) {
		widths[column] = width_of(title_of(table, column));
		for (uint32_t row = 0; row < n_rows; row++) {
			const uint32_t width = width_of(table->cells[row * table->n_columns + column]);

			if (width > widths[column])
				widths[column] = width;
		}
	}
	for (uint32_t column = 0; column < table->n_columns; column++)
		print_cell(table, column, widths[column], title_of(table, column), out);
	for (uint32_t i = 0; i < n_rows * table->n_columns; i++)
		print_cell(table, i % table->n_columns, widths[i % table->n_columns], table->cells[i], out);
	if (table->is_truncated)
		fputs("(rows left out: no memory)\n", out);
}

/* `scales` ascending; the last one that does not exceed the value is taken. Three significant digits. */
struct scale {
	double unit;
	const char *name;
};

static const char *human(double value, const struct scale *scales, uint32_t n_scales, char *text)
{
	uint32_t i = 0;

	while (i + 1 < n_scales && value >= scales[i + 1].unit)
		i++;
	const double shown = value / scales[i].unit;
	const int n_decimals = i == 0 || shown >= 100 ? 0 : shown >= 10 ? 1 : 2;

	snprintf(text, SRV_HUMAN_BYTES, "%.*f %s", n_decimals, shown, scales[i].name);
	return text;
}

const char *srv_human_bytes(uint64_t n_bytes, char text[static SRV_HUMAN_BYTES])
{
	static const struct scale scales[] = { { 1, "B" }, { 0x1p10, "KiB" }, { 0x1p20, "MiB" },
		{ 0x1p30, "GiB" }, { 0x1p40, "TiB" } };

	return human((double)n_bytes, scales, sizeof(scales) / sizeof(scales[0]), text);
}

const char *srv_human_ns(uint64_t ns, char text[static SRV_HUMAN_BYTES])
{
	static const struct scale scales[] = { { 1, "ns" }, { 1e3, "us" }, { 1e6, "ms" }, { 1e9, "s" } };

	return human((double)ns, scales, sizeof(scales) / sizeof(scales[0]), text);
}

const char *srv_human_ms(uint64_t ms, char text[static SRV_HUMAN_BYTES])
{
	static const struct scale scales[] = { { 1, "ms" }, { 1e3, "s" }, { 6e4, "min" }, { 3.6e6, "h" },
		{ 8.64e7, "d" } };

	return human((double)ms, scales, sizeof(scales) / sizeof(scales[0]), text);
}

char *srv_printable(char *text)
{
	for (char *c = text; *c != '\0'; c++)
		if ((unsigned char)*c < 0x20 || *c == 0x7F)
			*c = '?';
	return text;
}

const char *srv_human_tenant(const char *tenant, char text[static SRV_TABLE_CELL_BYTES])
{
	const bool is_number =
		*tenant && strspn(tenant, "0123456789") == strlen(tenant) && strlen(tenant) <= 10;
	const unsigned long long number = is_number ? strtoull(tenant, NULL, 10) : UINT64_MAX;
	/* UINT32_MAX is no user: chown() and others take it for none. */
	const struct passwd *user = number < UINT32_MAX ? getpwuid((uid_t)number) : NULL;

	if (user)
		snprintf(text, SRV_TABLE_CELL_BYTES, "%s (%.100s)", tenant, user->pw_name);
	else
		snprintf(text, SRV_TABLE_CELL_BYTES, "%.100s", tenant);
	return text;
}
