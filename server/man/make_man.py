#!/usr/bin/env python3
"""Writes the man pages from what the programs say of themselves.

usage: make_man.py tqkvd|tqkvctl PROGRAM OUT

Options, commands, defaults and exit codes come from --help, which is made from the option tables, so a page cannot
tell of an option that is not there or leave one out. What --help has no room for stands in this file.
"""
import pathlib
import re
import subprocess
import sys

ABOUT = {
    "tqkvd": ("8", "keep compressed K/V caches and answer decode queries", """
tqkvd keeps the K/V caches of many token sequences in pages of compressed rows, in the memory of a GPU or of the host.
Frontends stream rows and queries over a binary protocol; operators ask and change things over an HTTP/JSON API.

The normative description of the protocol is proto/PROTOCOL.md in the source tree.
"""),
    "tqkvctl": ("1", "control, load and measurements for tqkvd", """
tqkvctl asks a running tqkvd what it holds, changes it, sends it load and compares its answers with its own. The codec
commands need no daemon.
"""),
}
SIGNALS = [
    ("SIGTERM, SIGINT", "Drain: no new sessions; those that are there go on for drain_timeout_ms, then the daemon ends with 0."),
]
FILES = [("/run/tqkv/tqkvd.sock", "the default data address"),
         ("/run/tqkv/tqkvd.sock.lock", "held while the daemon runs, so that two never share an address")]


def escape(text):
    """Text as roff reads it: a backslash, a minus of an option, a dot or quote that begins a line."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text[:1] in (".", "'") else text


def ask(program, *words):
    """What the program prints on --help."""
    return subprocess.run([program, *words, "--help"], capture_output=True, text=True, check=True).stdout


def paragraphs(text):
    """The lines of each paragraph, .PP between them."""
    out = []
    for part in re.split(r"\n\s*\n", text.strip()):
        if out:
            out.append(".PP")
        out.extend(escape(line.strip()) for line in part.splitlines())
    return out


def tagged(term, lines):
    """.TP with a bold term."""
    out = [".TP", ".B " + escape(term)]
    out.extend(escape(line) for line in lines)
    return out


def daemon_page(program):
    """Sections of tqkvd: "  --name VALUE" with deeper lines below, under titles at the margin."""
    out, sections = [], re.split(r"\n\n", ask(program).strip())
    usage = next(part for part in sections if part.startswith("Usage: "))
    out += [".SH SYNOPSIS", ".nf", escape(usage[len("Usage: "):].strip()), ".fi", ".SH DESCRIPTION"]
    out += paragraphs(ABOUT["tqkvd"][2])
    out.append(".SH OPTIONS")
    rest = []
    for part in sections[sections.index(usage) + 1:]:
        lines = part.splitlines()
        if len(lines) < 2 or not lines[1].startswith("  -"):
            rest.append(part)
            continue
        out += [".SS " + escape(lines[0])]
        for block in re.split(r"\n(?=  -)", "\n".join(lines[1:])):
            term, *text = block.splitlines()
            out += tagged(term.strip(), [line.strip() for line in text])
    exits = next(part for part in rest if part.startswith("Exit codes: "))
    rest.remove(exits)
    if rest:
        out += [".SS Values"] + paragraphs("\n\n".join(rest))
    return out + [".SH EXIT STATUS"] + paragraphs(exits[len("Exit codes: "):])


def entries(block):
    """("--name VALUE", text) of lines "  --name VALUE   text"; deeper lines go on."""
    for entry in re.split(r"\n(?=  \S)", block):
        found = re.match(r"  (\S.*?)(?:\s{2,}(.*))?$", re.sub(r"\n\s+", " ", entry))
        if found:
            yield found.group(1), found.group(2) or ""


def control_page(program):
    """Sections of tqkvctl: the commands, each with its own --help."""
    out, help_text = [], ask(program)
    usage = re.search(r"usage: (.*)", help_text).group(1)
    commands = re.search(r"commands:\n(.*?)\n\n", help_text, re.S).group(1)
    common = re.search(r"options of every command:\n(.*?)\n\n", help_text, re.S).group(1)
    exits = re.search(r"Exit codes: (.*)", help_text).group(1)
    out += [".SH SYNOPSIS", ".nf", escape(usage), ".fi", ".SH DESCRIPTION"] + paragraphs(ABOUT["tqkvctl"][2])
    out += [".SH OPTIONS OF EVERY COMMAND"]
    for term, text in entries(common):
        out += tagged(term, [text])
    out.append(".SH COMMANDS")
    for term, _ in entries(commands):
        words = [word for word in term.split() if re.fullmatch(r"[a-z0-9-]+", word)]
        own = ask(program, *words)
        body = own.split("\n\n", 1)[1]
        about = re.split(r"\n\noptions(?: of every command)?:\n", body)[0]
        out += [".SS " + escape(term)] + paragraphs(about)
        options = re.search(r"\noptions:\n(.*?)\n\n", own, re.S)
        for name, text in entries(options.group(1)) if options else ():
            out += tagged(name, [text] if text else [])
    return out + [".SH EXIT STATUS"] + paragraphs(exits)


def main():
    if len(sys.argv) != 4 or sys.argv[1] not in ABOUT:
        sys.exit(__doc__)
    name, program, out_path = sys.argv[1:]
    section, summary, _ = ABOUT[name]
    other = "tqkvctl(1)" if name == "tqkvd" else "tqkvd(8)"
    lines = [f'.TH {name.upper()} {section} "" "tqkv" "tqkv manual"', ".SH NAME", f"{name} \\- {escape(summary)}"]
    lines += daemon_page(program) if name == "tqkvd" else control_page(program)
    if name == "tqkvd":
        lines.append(".SH SIGNALS")
        for term, text in SIGNALS:
            lines += tagged(term, [text])
        lines.append(".SH FILES")
        for term, text in FILES:
            lines += tagged(term, [text])
    page, number = other[:-1].split("(")
    lines += [".SH SEE ALSO", f".BR {page} ({number})"]
    pathlib.Path(out_path).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
