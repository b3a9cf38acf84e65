/* What reply.c and reply_rows.c share. */
#ifndef TESTS_SIM_REPLY_H
#define TESTS_SIM_REPLY_H

#include "tests/sim/peer.h"

/* Ends the process: the reply is not what it must be. */
_Noreturn void sim_reply_no(const struct sim_request *request, const char *what);
/* Does the state of the request's session explain this status? */
bool sim_reply_session_error(struct sim_peer *peer, const struct sim_request *request, enum kv_status status);
/* APPEND, DECODE, APPEND_DECODE, READ. */
void sim_reply_check_rows(struct sim_peer *peer, struct sim_request *request, const struct kvp_header *header,
	const uint8_t *body);

#endif
