#!/usr/bin/env python3
"""end_to_end.py TQKVD TQKVCTL: the two bars of the whole way over a Unix socket, on a GPU, with their parts.

A decode step of 32 sequences x 8k of one layer, 32 query and 8 KV heads: at most the kernels' time and one and a half
times the median of an echo of the same bytes. Rows of one client: at least 0.7 of what an echo brings in.
"""
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

tqkvd, tqkvctl = sys.argv[1:3]


def control(folder, http, *words):
	"""Runs one command of tqkvctl against the daemon; returns its JSON."""
	command = [tqkvctl, "--addr", f"unix:{folder}/tqkvd.sock", "--http", http, "--json", "--timeout-ms", "60000", *words]
	done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
	if done.returncode != 0:
		sys.exit(f"{' '.join(words)}: {done.stderr}")
	return json.loads(done.stdout)


def wait_for_http(log, daemon):
	for _ in range(300):
		found = re.search(r"control API on http://(\S+)", log.read_text())
		if found:
			return found.group(1)
		if daemon.poll() is not None:
			break
		time.sleep(0.1)
	sys.exit(f"the daemon did not come up:\n{log.read_text()}")


def judge(name, found, bound, parts):
	is_met = found <= bound
	print(f"{'ok    ' if is_met else 'MISSED'} {name}: {found:.1f}, bound {bound:.1f}; {parts}")
	return is_met


def main():
	with tempfile.TemporaryDirectory(prefix="tqkv-gpu.") as folder:
		log = pathlib.Path(folder) / "tqkvd.log"
		with log.open("w") as out:
			daemon = subprocess.Popen([tqkvd, "--backend", "cuda", "--listen", f"unix:{folder}/tqkvd.sock", "--http",
				"127.0.0.1:0", "--memory", "2GiB"], stderr=out)
		try:
			http = wait_for_http(log, daemon)
			step = control(folder, http, "bench", "step", "--sequences", "32", "--context", "8192", "--q-heads", "32",
				"--kv-heads", "8", "--head-dim", "128", "--count", "300", "--rounds", "3")
			ingest = control(folder, http, "bench", "ingest")
		finally:
			daemon.terminate()
			daemon.wait(timeout=30)
	print(json.dumps({"step": {k: v for k, v in step.items() if k != "rounds_p50"}, "ingest": ingest}, indent=1))
	recv_us, copy_us, else_us = step["recv_mean_us"], step["copy_mean_us"], step["else_mean_us"]
	echo_us, kernel_us = step["echo_p50_ns"] / 1e3, step["kernel_mean_us"]
	is_met = judge("decode step, us", step["step_p50_ns"] / 1e3, kernel_us + 1.5 * echo_us,
		f"kernels {kernel_us:.1f}, echo {echo_us:.1f}, in the daemon {step['server_mean_us']:.1f}: "
		f"receiving {recv_us:.1f}, queue {step['queue_mean_us']:.1f}, copies {copy_us:.1f}, else {else_us:.1f}")
	is_met &= judge("ingest, echo's rate over it", 1 / ingest["ratio"], 1 / 0.7,
		f"{ingest['ingest_bytes_per_s'] / 1e9:.2f} GB/s, echo {ingest['echo_bytes_per_s'] / 1e9:.2f} GB/s")
	return 0 if is_met else 1


if __name__ == "__main__":
	sys.exit(main())
