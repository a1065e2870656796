"""Objects in checkpoint files, made of their fields alone.

pickle makes an object by its class's own code, which may do anything, or, where the class has none for that, of a dictionary of its
fields. The second is done here, without a line of the class: for plain classes and dataclasses of the script, configurations of
transformers and members of enums. What a script does with them later runs their methods, so classes of other libraries are left
to who trusts the file. Nothing is imported for it: a class is one that the script has, or is refused.
"""

import argparse
import enum
import os
import pickle
import sys
import types


class Object:
    """Stands for an object while its file is read."""

    cls = None

    def __new__(cls):  # which an unpickler calls, and not __init__
        own = super().__new__(cls)
        own.made = cls.cls() if cls.cls in _PLAIN else object.__new__(cls.cls)
        own.fields = {}
        return own

    def __setstate__(self, state):
        if not isinstance(state, dict) or not all(type(name) is str for name in state):
            raise pickle.UnpicklingError(f"expected an object of named fields, got {self.cls.__qualname__} with {type(state).__name__}")
        self.fields = state

    def __hash__(self):  # its class's own would run
        raise pickle.UnpicklingError(f"expected keys and members of sets to be plain values, got {self.cls.__qualname__}")


# An unpickler sets attributes of objects of other classes, __class__ among them.
_PLAIN = (argparse.Namespace, types.SimpleNamespace)
NAMESPACES = [(type(cls.__name__, (Object,), {"cls": cls}), f"{cls.__module__}.{name}")
              for cls, name in zip(_PLAIN, ("Namespace", "SimpleNamespace"), strict=True)]  # fmt: skip


def fields_of(made):
    """Without what its class may have put there."""
    return object.__getattribute__(made, "__dict__")


def standing_in(names):
    """For torch.serialization.safe_globals: those of `names`, 'module.Class', that can be made so."""
    found = ((name, _class_of(name)) for name in names)
    return [(stand, name) for name, cls in found if cls is not None and (stand := _stand_in(cls)) is not None]


def _class_of(name):
    module, _, own = name.rpartition(".")
    cls = vars(sys.modules[module]).get(own) if module in sys.modules else None
    return cls if isinstance(cls, type) and (cls.__module__, cls.__qualname__) == (module, own) else None


def _stand_in(cls):
    if isinstance(cls, enum.EnumMeta):
        return lambda value: _member(cls, value)
    if (_is_of_script(cls) or _is_of_transformers(cls)) and _keeps_fields_alone(cls):
        return type(cls.__name__, (Object,), {"cls": cls})
    return None


def _member(cls, value):
    found = cls._value2member_map_.get(value) if type(value) in (str, int, float, bool) else None
    if found is None:
        raise pickle.UnpicklingError(f"expected the value of a member of {cls.__qualname__}, got {value!r}")
    return found


def _keeps_fields_alone(cls):
    """Whether pickle would make it of its fields, and nothing of its own runs when it is made or goes."""
    classes = [vars(each) for each in cls.__mro__[:-1]]
    own = {name for each in classes for name in each}
    has_fields = all(isinstance(each["__dict__"], types.GetSetDescriptorType) for each in classes if "__dict__" in each)
    makes = {"__new__", "__reduce__", "__reduce_ex__", "__setstate__", "__slots__", "__del__", "__class__"}
    return has_fields and not own & makes


def _is_of_transformers(cls):
    return any(
        (each.__module__.partition(".")[0], each.__name__) in (("transformers", "PretrainedConfig"), ("transformers", "GenerationConfig"))
        for each in cls.__mro__
    )


def _is_of_script(cls):
    """Its main module, or one beside that."""
    folder = os.path.dirname(os.path.abspath(getattr(sys.modules["__main__"], "__file__", None) or "notebook"))
    file = getattr(sys.modules[cls.__module__], "__file__", None)
    is_installed = file is not None and "site-packages" in file
    return cls.__module__ == "__main__" or (file is not None and not is_installed and os.path.abspath(file).startswith(folder + os.sep))
