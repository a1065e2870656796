"""The stubs declare what the package has, and what they say of it holds for mypy, where that is installed."""

import ast
import collections
import importlib
import importlib.util
import inspect
import pathlib
import subprocess
import sys
import tempfile
import unittest

import smdistributed.modelparallel.torch as smp

PACKAGE = pathlib.Path(smp.__file__).parent
SCRIPT = pathlib.Path(__file__).with_name("typed_script.py")


def names_of(statement):
    if isinstance(statement, ast.ImportFrom):
        return [alias.asname for alias in statement.names if alias.asname]
    return [statement.target.id if isinstance(statement, ast.AnnAssign) else statement.name]


def functions_of(body):
    """The parameters of functions, by name; of an overloaded one those that any overload has."""
    found = collections.defaultdict(set)
    for each in body:
        if isinstance(each, ast.FunctionDef):
            arguments = each.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            found[each.name] |= {argument.arg for argument in every if argument}
    return found


class Stubs(unittest.TestCase):
    def test_declare_the_names_of_the_package(self):
        body = ast.parse((PACKAGE / "__init__.pyi").read_text()).body
        declared = {name for statement in body for name in names_of(statement)}
        had = {name for name, value in vars(smp).items() if name[0] != "_" and not inspect.ismodule(value)}
        self.assertEqual({name for name in declared if not inspect.ismodule(getattr(smp, name, None))}, had)

    def test_declare_functions_and_methods_as_they_are(self):
        for stub in PACKAGE.glob("*.pyi"):
            module = importlib.import_module(f"{smp.__name__}.{stub.stem}") if stub.stem != "__init__" else smp
            body = ast.parse(stub.read_text()).body
            self.compare(functions_of(body), module, stub.name)
            for each in body:
                own = vars(getattr(module, each.name, object)) if isinstance(each, ast.ClassDef) else {}
                others = property, staticmethod
                methods = {name for name, value in own.items() if inspect.isfunction(value) or isinstance(value, others)}
                if methods:
                    declared = functions_of(each.body)
                    self.assertEqual({n for n in declared if n[0] != "_"}, {n for n in methods if n[0] != "_"}, each.name)
                    self.compare(declared, getattr(module, each.name), each.name)

    def compare(self, declared, owner, where):
        for name, parameters in declared.items():
            value = getattr(owner, name)
            if inspect.isfunction(value):  # and none of the extension, whose parameters nobody can ask for
                self.assertEqual(parameters, set(inspect.signature(value).parameters), f"{where}: {name}")

    @unittest.skipUnless(importlib.util.find_spec("mypy"), "no mypy beside torch")
    def test_mypy_sees_what_the_script_says(self):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={folder}", str(SCRIPT)]
            run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)


if __name__ == "__main__":
    unittest.main()
