/* What the parts of the random client share: client.c behaves, client_ask.c makes requests. */
#ifndef TESTS_SIM_CLIENT_H
#define TESTS_SIM_CLIENT_H

#include "tests/sim/peer.h"

/* Sends the whole frame, or part of it with an accident. */
void sim_client_send(struct sim_peer *peer, struct sim_request *request);
/* Makes up one request and sends it. */
void sim_client_ask(struct sim_peer *peer);
/* Ends every pause: the rest of a frame is sent, replies are read. */
void sim_client_wake(struct sim_peer *peer);

#endif
