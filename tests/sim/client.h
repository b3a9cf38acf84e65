/* What the parts of the random client share: client.c behaves, client_ask.c makes requests. */
#ifndef TESTS_SIM_CLIENT_H
#define TESTS_SIM_CLIENT_H

#include "tests/sim/peer.h"

/* Sends the whole frame, or part of it with an accident. */
void sim_client_send(struct sim_peer *peer, struct sim_request *request);
/* Makes up one request and sends it. */
void sim_client_ask(struct sim_peer *peer);
/* Parts of it. */
void sim_client_choose_layers(struct sim_peer *peer, struct sim_request *request);
void sim_client_choose_dtypes(struct sim_peer *peer, struct sim_request *request);
void sim_client_submit(struct sim_peer *peer, struct sim_request *request);
/* client_tables.c: UPDATE_SLOTS or DECODE_TABLE. */
void sim_client_ask_tables(struct sim_peer *peer, const struct sim_session *session);
/* Ends every pause: the rest of a frame is sent, replies are read. */
void sim_client_wake(struct sim_peer *peer);

#endif
