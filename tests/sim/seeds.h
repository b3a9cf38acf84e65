/*
 * Seeds whose runs failed once. They are run first, always. What they found has a scenario of its own in
 * test_found.c.
 */
#ifndef TESTS_SIM_SEEDS_H
#define TESTS_SIM_SEEDS_H

#define SIM_OLD_SEEDS                                                                                      \
	22,          /* a hanging device, and a finished batch behind a running one, made the loop spin */ \
		66,  /* a taken pool name was told as a lack of memory */                                  \
		156, /* closed inside op structs: the read-ahead buffer was lost */                        \
		202842,  /* HELLO waited for a reply buffer, and was late */                               \
		100305,  /* another connection closed the session that a parked one waited for */          \
		25818,   /* control requests that waited for a batch made the loop spin */                 \
		310,     /* draining was over and a snapshot still ran: the loop span */                   \
		50888,   /* places were taken by sessions that were being restored */                      \
		55072,   /* a touch took the rows of what the answer was about */                          \
		6005420, /* two pinned sequences with the same blocks were restored */                     \
		21557,   /* the network's peer took its time to read */

#endif
