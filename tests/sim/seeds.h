/*
 * Seeds whose runs failed once, each with what it found. They are run first, always.
 */
#ifndef TESTS_SIM_SEEDS_H
#define TESTS_SIM_SEEDS_H

#define SIM_OLD_SEEDS 1,

#endif
