/* Snapshots in random runs. */
#ifndef TESTS_SIM_SNAPSHOTS_H
#define TESTS_SIM_SNAPSHOTS_H

#include "tests/sim/world.h"

/* Begins one, or a restore, or damages a file. */
void sim_snapshots_act(struct sim_world *world);
/* After a turn: what came of them. */
void sim_snapshots_watch(struct sim_world *world);
/* The process is killed and started again with what its disk holds; everything is restored that can be. */
void sim_snapshots_restart(struct sim_world *world, const struct sim_config *config);

#endif
