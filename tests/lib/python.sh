# Sourced: sets $python to an interpreter that has numpy (Debian's package belongs to /usr/bin/python3).
python=
for candidate in "${PYTHON:-}" python3 /usr/bin/python3; do
	if [ -n "$candidate" ] && "$candidate" -c 'import numpy' 2>/dev/null; then
		python=$candidate
		break
	fi
done
if [ -z "$python" ]; then
	echo "no python3 with numpy found (Debian: python3-numpy)" >&2
	exit 1
fi
