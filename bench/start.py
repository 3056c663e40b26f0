"""The console script `forge-bench`."""

from vlaforge.runtime.commands.start import command

main = command("forge-bench", "vlaforge.bench.cli")
