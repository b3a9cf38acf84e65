"""What tests/bench/run prints: one table, one row per figure, with its bound where one is promised."""

import json
import os
import platform
import resource
import struct

import frames
from daemon import CAPTURE, DEMO, EXACT, Daemon

N_IDLE = 10000
MIB = 1 << 20
# 64 MiB of rows: K and V of 4 layers, 8 KV heads of 128 in f32 are 32 KiB per token.
LARGE = "name=large,layers=4,q_heads=8,kv_heads=8,head_dim=128,k=f32,v=f32,block_size=16,blocks=128"
LARGE_TOKENS = 2048
IOS = ("io_uring", "epoll")


def row(figure, value, bound="", how=""):
    print(f"{figure:52}  {value:>22}  {bound:>12}  {how}", flush=True)


def daemon_with(io, *args):
    os.environ["TQKV_IO"] = io
    return Daemon(*args)


def usable_ios():
    """io_uring is denied in many containers."""
    with daemon_with("auto", "--pool", DEMO) as daemon:
        return IOS if daemon.get("/v1/info")["io"] == "io_uring" else IOS[1:]


def bench_step(io):
    with daemon_with(io, "--pool", DEMO) as daemon:
        step = json.loads(daemon.ctl("bench", "step", "--json").stdout)
        row(f"step beside echo, p50 of 5 rounds, {io}",
            f"{step['step_p50_ns'] / 1e3:.1f} / {step['echo_p50_ns'] / 1e3:.1f} us", "", "tqkvctl bench step")
        row(f"  ratio, 1 sequence of {step['context']} tokens", f"{step['ratio_p50']:.2f}", "<= 2.5",
            "tqkvctl bench step")
        echo = json.loads(daemon.ctl("bench", "echo", "--json").stdout)
        row(f"echo of 4 KiB, {io}", f"{echo['n'] / echo['took_ns'] * 1e9:.0f} / s", "", "tqkvctl bench echo")


def replay(io):
    with daemon_with(io, "--pool", DEMO) as daemon:
        result = json.loads(daemon.ctl("replay", CAPTURE, "--json").stdout)
        traffic = result["traffic"]
        row(f"replay of {result['model']}, prefill, {io}", f"{traffic['prefill_rows_per_s']:.0f} rows/s", "",
            "tqkvctl replay FILE")
        row("  decode, one request per layer", f"{traffic['decode_rows_per_s']:.0f} rows/s", "", "tqkvctl replay FILE")
        row("  round trip p50 / p99",
            f"{traffic['round_trip_p50_ns'] / 1e3:.1f} / {traffic['round_trip_p99_ns'] / 1e3:.1f} us", "",
            "tqkvctl replay FILE")
        row("  bytes per token / compression", f"{result['bytes_per_token']:.0f} / {result['compression']:.2f}", "",
            "tqkvctl replay FILE")


def fill(daemon):
    """Rows into every block."""
    line = struct.pack("<1024f", *[0.25] * 1024)  # 8 KV heads of 128
    with frames.Raw(daemon.addr) as raw:
        raw.hello()
        session = raw.open(b"large", name=b"full")
        n = 24  # 768 KiB of K and V of four layers in each frame
        for position in range(0, LARGE_TOKENS, n):
            n_now = min(n, LARGE_TOKENS - position)
            reply = raw.call(frames.rows(frames.APPEND, session, [(1, position, n_now, 0, int(position == 0))],
                                         n_layers=4,
                                         k=line * 4 * n_now, v=line * 4 * n_now))
            assert reply.item_statuses() == [0], (reply.status, reply.detail())


def memory():
    with daemon_with("auto", "--pool", EXACT) as daemon:
        row("resident memory of a fresh daemon", f"{daemon.resident_bytes() / MIB:.1f} MiB", "<= 64 MiB", "/metrics")
    with daemon_with("auto", "--pool", LARGE) as daemon:
        fill(daemon)
        metrics = daemon.metrics()
        pools, slots = metrics["tqkv_arena_used_bytes"], metrics["tqkv_slots_bytes"]
        resident = daemon.resident_bytes()
        stored = metrics['tqkv_pool_stored_bytes{device="%s",pool="large"}' % daemon.get("/v1/info")["backend"]]
        row("resident with a full pool", f"{resident / MIB:.1f} MiB", "", "/metrics")
        row("  pool, all of it in use / request slots", f"{pools / MIB:.1f} / {slots / MIB:.1f} MiB", "", "/metrics")
        # Slots that were never used are not resident: the promise is without them, and holds with them.
        row("  resident minus pool, used slots included", f"{(resident - stored) / MIB:.1f} MiB", "<= 64 MiB",
            "/metrics")


def idle_connections():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    n = min(N_IDLE, hard - 300)
    if n <= 0:
        row("bytes per idle connection", "no descriptors", "< 4096", "")
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (n + 300, hard))
    for io in usable_ios():
        with daemon_with(io, "--pool", EXACT) as daemon:
            warm = [frames.Raw(daemon.addr) for _ in range(50)]
            for raw in warm:
                raw.hello()
            before = daemon.resident_bytes()
            idle = []
            for _ in range(n):
                raw = frames.Raw(daemon.addr)
                raw.send(frames.hello())
                idle.append(raw)
            for raw in idle:
                raw.reply()
            row(f"bytes per idle connection, {n} of them, {io}", f"{(daemon.resident_bytes() - before) / n:.0f}",
                "< 4096",
                "/metrics")
            for raw in idle + warm:
                raw.close()


def main():
    with Daemon("--pool", DEMO) as daemon:
        info = daemon.get("/v1/info")
        print(f"tqkvd {info['version']}, {info['device']}, {info['instruction_set']}, {os.cpu_count()} CPUs, "
              f"Linux {platform.release()}\n")
    print(f"{'figure':52}  {'value':>22}  {'bound':>12}  printed by")
    for io in usable_ios():
        bench_step(io)
    for io in usable_ios():
        replay(io)
    memory()
    idle_connections()


if __name__ == "__main__":
    main()
