/* What the mutation program runs: each scenario starts and stops a rig of its own and ends the process when
 * something is wrong. */
#ifndef TESTS_MUTATION_SCENARIOS_H
#define TESTS_MUTATION_SCENARIOS_H

void scenario_sessions(void);  /* scenarios_session.c: pools, names, leases, connections, control requests */
void scenario_rows(void);      /* scenarios_rows.c: rows, blocks, batches, refusals */
void scenario_tables(void);    /* scenarios_tables.c: clients' tables, windows, the exact window */
void scenario_snapshots(void); /* scenarios_snapshot.c: snapshots and what is wrong with their files */

#endif
