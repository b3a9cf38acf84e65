/*
 * Replies: from a server's bytes to struct tqkv_reply.
 *
 * The bytes are not trusted: every length, count, offset, echo and number is compared with what was asked for
 * before it is used, and nothing outside the body is touched. No heap, no I/O, no state; any thread.
 */
#ifndef PROTO_CLIENT_REPLY_H
#define PROTO_CLIENT_REPLY_H

#include "proto/check.h"
#include "proto/client/tqkv.h"

/* Our own request, trusted. */
struct tqkv_asked {
	const struct kvp_header *header;
	const uint8_t *body;                 /* op struct and items at least */
	const struct kvp_geometry *geometry; /* of the session; NULL for operations without */
};

/* Where decoded items go. */
struct tqkv_reply_space {
	struct tqkv_item_result items[KVP_ITEMS_MAX];
	struct tqkv_sequence sequences[KVP_ITEMS_MAX];
};

/* Op structs of control replies. */
union tqkv_reply_op {
	struct kvp_hello_reply hello;
	struct kvp_ping_reply ping;
	struct kvp_open_reply open;
	struct kvp_pool_info_reply pool_info;
	struct kvp_cancel_reply cancel;
	struct kvp_prefix_reply prefix;
};

/*
 * `header` was accepted by kvp_header_decode(), `body` has its body_bytes (aligned as by malloc). OK: `reply`
 * and, for control operations, `op` (may be NULL) are filled. A status that the server sent: `err` is filled
 * from the error frame, is_local is false. BAD_FRAME with is_local: the reply contradicts itself or the
 * request; drop the connection. HELLO's reply is decoded whatever its status.
 */
enum tqkv_status tqkv_reply_decode(const struct tqkv_asked *asked, const struct kvp_header *header,
	const uint8_t *body, struct tqkv_reply_space *space, struct tqkv_reply *reply,
	union tqkv_reply_op *op, struct tqkv_error *err);

/* An error frame's struct and detail into `err`; control characters of the detail become '?'. */
enum tqkv_status tqkv_reply_error(
	const struct kvp_header *header, const uint8_t *body, struct tqkv_error *err);

#endif
