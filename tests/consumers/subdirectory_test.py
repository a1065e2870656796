"""A project that vendors smp compiles the library as our build does, itself without our settings, and runs.

Usage: subdirectory_test.py SOURCE BUILD OUR_BUILD COMPILER CMAKE_OPTION ...

The library is not compiled again. The commands that would do it are, but for the folder, those that have made the
archives of OUR_BUILD, which therefore take the place of what they would make.
"""

import json
import pathlib
import shutil
import subprocess
import sys

ARCHIVES = ["smp/libsmp.a", "runtime/libsmp_runtime.a", "partitioner/libsmp_partitioner.a"]


def run(command, cwd=None):
    done = subprocess.run(command, cwd=cwd, shell=isinstance(command, str), text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def library_compilations(build, folder):
    """By output file, as seen from the folder of smp's build: the command, and the source where CMake has made that."""
    found = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        command = entry["command"].replace(f"{build / folder}/", "").replace(" -o " + folder, " -o ")
        output = command.split(" -o ")[1].split()[0]
        if output.split("/")[0] in ("smp", "runtime", "partitioner"):
            is_made = "/Unity/" in output
            text = pathlib.Path(entry["file"]).read_text().replace(f"{build / folder}/", "") if is_made else ""
            found[output] = (command, text)
    return found


def main():
    source, build, our_build, compiler, *options = sys.argv[1:]
    build, our_build = pathlib.Path(build), pathlib.Path(our_build)
    shutil.rmtree(build, ignore_errors=True)
    print(run(["cmake", "-G", "Ninja", "-S", source, "-B", build, f"-DCMAKE_CXX_COMPILER={compiler}", *options]))

    ours = library_compilations(our_build, "")
    vendored = library_compilations(build, "smp/")
    assert vendored and vendored.keys() == ours.keys(), f"expected {ours.keys()}, got {vendored.keys()}"
    for output, compilation in vendored.items():
        assert compilation == ours[output], f"{output}: expected\n{ours[output]}\ngot\n{compilation}"

    for archive in ARCHIVES:
        shutil.copy(our_build / archive, build / "smp" / archive)
    commands = run(["ninja", "-t", "commands", "consumer"], build).splitlines()
    for command in commands:
        assert command.startswith(compiler) or " -c " not in command, f"expected no ccache of ours, got {command}"
    compilation, link = [command for command in commands if " CMakeFiles/consumer.dir/" in command]
    assert "-Werror" not in compilation, f"expected no warnings of ours, got {compilation}"
    (build / compilation.split(" -o ")[1].split()[0]).parent.mkdir(parents=True, exist_ok=True)
    run(compilation, build)
    run(link, build)
    print(run([build / "consumer"]))


if __name__ == "__main__":
    main()
