/*
 * A daemon that loses a block: linked into tqkvd_leaky, where giving a block up goes through here. After
 * SIGUSR2, which it answers with a line on stderr, the next one is forgotten, once.
 */
#include <signal.h>
#include <unistd.h>

#include "core/block_pool.h"

void __real_kv_block_pool_disown(struct kv_block_pool *pool, kv_block_id id);
void __wrap_kv_block_pool_disown(struct kv_block_pool *pool, kv_block_id id);

static volatile sig_atomic_t is_armed;

static void arm(int signal_number)
{
	static const char text[] = "1970-01-01T00:00:00.000Z info armed\n";

	(void)signal_number;
	is_armed = 1;
	(void)!write(STDERR_FILENO, text, sizeof(text) - 1);
}

__attribute__((constructor)) static void take_signal(void)
{
	struct sigaction action = { .sa_handler = arm, .sa_flags = SA_RESTART };

	sigaction(SIGUSR2, &action, NULL);
}

void __wrap_kv_block_pool_disown(struct kv_block_pool *pool, kv_block_id id)
{
	if (!is_armed)
		__real_kv_block_pool_disown(pool, id);
	is_armed = 0;
}
