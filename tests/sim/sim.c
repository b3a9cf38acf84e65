#include "tests/sim/sim.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

struct sim_where sim_where;
bool sim_is_verbose;

void sim_fail(const char *fmt, ...)
{
	va_list args;

	fflush(stdout);
	fprintf(stderr, "sim: seed %llu, turn %llu: ", (unsigned long long)sim_where.seed,
		(unsigned long long)sim_where.turn);
	va_start(args, fmt);
	vfprintf(stderr, fmt, args);
	va_end(args);
	fprintf(stderr, "\n");
	abort();
}

void sim_say(const char *fmt, ...)
{
	va_list args;

	if (!sim_is_verbose)
		return;
	printf("%7llu ", (unsigned long long)sim_where.turn);
	va_start(args, fmt);
	vprintf(fmt, args);
	va_end(args);
}
