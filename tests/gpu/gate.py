#!/usr/bin/env python3
"""gate.py BENCH.json: no decode takes more than a tenth longer, over the time its bytes need, than was recorded.

BENCH.json is what `tqkv-kernel-bench --json` prints. Figures are shares of the read rate of the same run, so that a slower
card of the same kind does not matter; the table below is that of gpu/KERNELS.md.
"""
import json
import sys

SHAPES = ("32/8, 64 x 8k", "64/8, 16 x 32k", "32/32, 16 x 4k", "32/8, 1 x 128k")
RECORDED = {
	"tq4": (0.895, 0.89, 0.84, 0.78),
	"tq3": (0.885, 0.80, 0.82, 0.76),
	"tq2": (0.825, 0.705, 0.76, 0.66),
}


def main():
	with open(sys.argv[1], encoding="utf-8") as file:
		bench = json.load(file)
	n_slow = 0
	print(f"{bench['device']}: reads {bench['read_rate'] / 1e9:.0f} GB/s{'' if bench['is_valid'] else ', not valid'}")
	for row in bench["decode"]:
		if row["k"] in RECORDED and row["shape"] in SHAPES:
			recorded = RECORDED[row["k"]][SHAPES.index(row["shape"])]
			is_slow = row["share"] * 1.1 < recorded
			n_slow += is_slow
			print(f"{'SLOW' if is_slow else 'ok  '} {row['k']} {row['shape']:15}: {row['us']:6.1f} us, {row['share']:.3f}, "
				f"recorded {recorded}; alone {row['alone_us']:.1f}, all {row['all_us']:.1f}, batch {row['batch_us']} us")
	for row in bench["ragged"]:
		is_slow = row["share"] < 0.9
		n_slow += is_slow
		print(f"{'SLOW' if is_slow else 'ok  '} {row['format']} {row['sequences']} ragged: {row['share']:.3f} of equal lengths")
	for row in bench["update"]:
		is_slow = row["us"] > 2 * row["floor_us"]
		n_slow += is_slow
		print(f"{'SLOW' if is_slow else 'ok  '} {row['format']} update of {row['tokens']}: {row['us']:.1f} us, floor "
			f"{row['floor_us']:.1f}")
	return 1 if n_slow else 0


if __name__ == "__main__":
	sys.exit(main())
