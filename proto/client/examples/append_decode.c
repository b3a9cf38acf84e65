/*
 * Attention over rows of your own, through libtqkv. The daemon is the one of README's "From Python":
 *
 *	cc -std=c11 -Iproto/client proto/client/examples/append_decode.c -o append_decode \
 *		-Lbuild/proto/client -ltqkv -Wl,-rpath,build/proto/client
 *	./append_decode unix:/tmp/tqkvd.sock  (or where TQKV_ADDR says)
 *
 * Installed: cc append_decode.c -o append_decode $(pkg-config --cflags --libs tqkv).
 */
#include <stdio.h>
#include <stdlib.h>
#include <tqkv.h>

enum { TOKENS = 100, Q_HEADS = 4, KV_HEADS = 2, HEAD_DIM = 64 };
static float k[TOKENS][KV_HEADS][HEAD_DIM], v[TOKENS][KV_HEADS][HEAD_DIM], q[Q_HEADS][HEAD_DIM],
	out[Q_HEADS][HEAD_DIM];

static void must(enum tqkv_status status, const struct tqkv_error *err)
{
	if (status == TQKV_OK)
		return;
	fprintf(stderr, "%s: %s\n", tqkv_status_name(status), err->message);
	exit(1);
}

int main(int argc, char **argv)
{
	const struct tqkv_open_params params = { .pool = "demo" };
	const struct tqkv_item rows_in = { .sequence = 1, .n_tokens = TOKENS, .flags = TQKV_CREATE };
	const struct tqkv_item seen = { .sequence = 1, .position = TQKV_POSITION_PLANNED, .q_len = 1 };
	struct tqkv_rows append = { .items = &rows_in,
		.n_items = 1,
		.n_layers = 1,
		.k = k,
		.v = v,
		.k_bytes = sizeof(k),
		.v_bytes = sizeof(v),
		.k_dtype = TQKV_F32,
		.v_dtype = TQKV_F32 };
	struct tqkv_rows decode = { .items = &seen,
		.n_items = 1,
		.n_layers = 1,
		.q = q,
		.q_bytes = sizeof(q),
		.q_dtype = TQKV_F32,
		.out_dtype = TQKV_F32 };
	struct tqkv_item_result told;
	struct tqkv_rows_result result = { .items = &told, .out = out, .out_bytes_max = sizeof(out) };
	struct tqkv_conn *conn;
	struct tqkv_session *session;
	struct tqkv_error err;

	/*
	 * Keys and queries come after RoPE. The values are all 0.5 here, and so is their weighted mean, as
	 * far as 4 bits go: tq4 keeps a row to about a tenth of its length.
	 */
	for (size_t i = 0; i < sizeof(k) / sizeof(float); i++) {
		((float *)k)[i] = (float)(rand() % 100) / 100;
		((float *)v)[i] = 0.5f;
	}
	for (size_t i = 0; i < sizeof(q) / sizeof(float); i++)
		((float *)q)[i] = (float)(rand() % 100) / 100;
	const char *address = argc > 1 ? argv[1] : getenv("TQKV_ADDR");

	must(tqkv_connect(address ? address : "unix:/tmp/tqkvd.sock", NULL, &conn, &err), &err);
	must(tqkv_open(conn, &params, 0, &session, &err), &err);
	/* OK says that it was answered; each item has a status of its own. */
	must(tqkv_append(session, &append, 0, &result, &err), &err);
	if (told.status == TQKV_OK)
		must(tqkv_decode(session, &decode, 0, &result, &err), &err);
	printf("%s: %u tokens, out[0][0] = %.3f\n", tqkv_status_name(told.status), told.length,
		(double)out[0][0]);
	must(tqkv_close(session, 0, &err), &err);
	tqkv_disconnect(conn);
	return told.status == TQKV_OK ? 0 : 1;
}
