#include <signal.h>
#include <stddef.h>

#include "server/ctl/ctl.h"

static volatile sig_atomic_t is_seen;

static void on_signal(int number)
{
	(void)number;
	is_seen = 1;
}

void srv_interrupt_catch(void)
{
	/* RESETHAND: the second signal ends the process. RESTART: calls in progress end by their own time
	 * limits. */
	struct sigaction action = { .sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND | SA_RESTART };

	sigemptyset(&action.sa_mask);
	sigaction(SIGINT, &action, NULL);
	sigaction(SIGTERM, &action, NULL);
}

bool srv_interrupt_seen(void)
{
	return is_seen != 0;
}
