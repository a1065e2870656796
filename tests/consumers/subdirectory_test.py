"""A project that vendors smp: it compiles the library as our build does, without our settings for itself, and its program runs.

Usage: subdirectory_test.py SOURCE BUILD OUR_BUILD COMPILER CMAKE_OPTION ...

The library is not compiled again. The commands that would do it are, but for the folder, those that have made the archives of
OUR_BUILD, which therefore take the place of what they would make.
"""

import json
import pathlib
import shutil
import subprocess
import sys

ARCHIVES = ["smp/libsmp.a", "runtime/libsmp_runtime.a", "partitioner/libsmp_partitioner.a"]


def run(command, cwd=None):
    done = subprocess.run(command, cwd=cwd, shell=isinstance(command, str), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, check=False)
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

    ours = {output: (command[command.index(compiler):], text)  # without ccache
            for output, (command, text) in library_compilations(our_build, "").items()}
    vendored = library_compilations(build, "smp/")
    assert len(vendored) > len(ARCHIVES) and vendored.keys() == ours.keys(), f"expected {ours.keys()}, got {vendored.keys()}"
    for output, compilation in vendored.items():
        assert compilation == ours[output], f"{output}: expected\n{ours[output]}\ngot\n{compilation}"

    for archive in ARCHIVES:
        shutil.copy(our_build / archive, build / "smp" / archive)
    compilation, *_, link = [command for command in run(["ninja", "-t", "commands", "consumer"], build).splitlines()
                             if " CMakeFiles/consumer.dir/" in command]
    assert compilation.startswith(compiler) and "-Werror" not in compilation, f"expected no setting of ours, got {compilation}"
    for command in (compilation, link):
        pathlib.Path(build, "CMakeFiles/consumer.dir", *pathlib.Path(source).parent.parts[1:]).mkdir(parents=True, exist_ok=True)
        run(command, build)
    print(run([build / "consumer"]))


if __name__ == "__main__":
    main()
