#!/usr/bin/env python3
"""compare_torch.py [TQKV_KERNEL_BENCH]: torch's attention in bf16 beside this project's, in one run on one GPU.

torch's keys and values are contiguous and in bf16, which is the best it can have; both of its backends (cuDNN and flash)
are timed by replays of CUDA graphs that rotate over copies larger than the L2 cache. Then tqkv-kernel-bench times the
same shapes, and the ratios are printed. Needs torch and a GPU; exit 77 without.
"""
import json
import subprocess
import sys

try:
	import torch
	from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as missing:
	print(missing)
	sys.exit(77)

SHAPES = (  # name, query heads, KV heads, sequences, tokens
	("32/8, 64 x 8k", 32, 8, 64, 8192),
	("64/8, 16 x 32k", 64, 8, 16, 32768),
	("32/32, 16 x 4k", 32, 32, 16, 4096),
	("32/8, 1 x 128k", 32, 8, 1, 131072),
	("32/8, 1 x 4k", 32, 8, 1, 4096),
)
COLD_BYTES = 300 << 20


def replay_us(step, n):
	"""Median time of one of n calls, captured in one graph."""
	side = torch.cuda.Stream()
	with torch.cuda.stream(side):
		for i in range(n):
			step(i)
	torch.cuda.synchronize()
	graph = torch.cuda.CUDAGraph()
	with torch.cuda.graph(graph):
		for i in range(n):
			step(i)
	times = []
	for _ in range(14):
		begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
		begin.record()
		graph.replay()
		end.record()
		end.synchronize()
		times.append(begin.elapsed_time(end) * 1e3 / n)
	return sorted(times[4:])[5]


def torch_us(backend, q_heads, kv_heads, n_seqs, n_tokens):
	"""One query of every sequence; queries of a KV head are rows of one matrix, so that K and V are read once."""
	group = q_heads // kv_heads
	n_bytes = 2 * n_seqs * kv_heads * n_tokens * 128 * 2
	n = max(2, min(64, -(-COLD_BYTES // n_bytes)))
	copies = [[torch.randn(n_seqs, kv_heads, n_tokens, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
		for _ in range(n)]
	q = torch.randn(n_seqs, kv_heads, group, 128, device="cuda", dtype=torch.bfloat16)

	def step(i):
		with sdpa_kernel(backend):
			torch.nn.functional.scaled_dot_product_attention(q, *copies[i])

	try:
		us = replay_us(step, n)
	except RuntimeError as error:
		print(f"  {backend}: {str(error).splitlines()[0]}", file=sys.stderr)
		us = float("nan")
	copies.clear()
	torch.cuda.empty_cache()
	return us, n_bytes


def main():
	if not torch.cuda.is_available():
		print("no GPU")
		return 77
	best = {}
	for name, *shape in SHAPES:
		cudnn, n_bytes = torch_us(SDPBackend.CUDNN_ATTENTION, *shape)
		flash, _ = torch_us(SDPBackend.FLASH_ATTENTION, *shape)
		found = [us for us in (cudnn, flash) if us == us]
		best[name] = min(found) if found else float("nan")
		print(f"torch {torch.__version__} bf16 {name:15}: cuDNN {cudnn:7.1f} us, flash {flash:7.1f} us, "
			f"{n_bytes / best[name] / 1e3:.0f} GB/s")
	if len(sys.argv) > 1:
		torch.cuda.synchronize()
		done = subprocess.run([sys.argv[1], "--json", "--brief"], capture_output=True, text=True, check=True)
		for row in json.loads(done.stdout)["decode"]:
			if row["shape"] in best:
				print(f"{row['k']:4} {row['shape']:15}: {row['us']:7.1f} us, {best[row['shape']] / row['us']:.2f} times as "
					f"fast; kernel alone {row['alone_us']:.1f} us, {best[row['shape']] / row['alone_us']:.2f}")
	return 0


if __name__ == "__main__":
	sys.exit(main())
