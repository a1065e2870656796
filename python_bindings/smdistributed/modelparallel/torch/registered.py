"""What modules have registered: parameters, buffers and submodules, as they were at one time against what is there now."""

import operator


def registered_in(module):
    """(path, the dictionary of a module, what that has now), three of each module."""
    return [
        (path, registered, dict(registered.items()))
        for path, each in module.named_modules()
        for registered in (each._parameters, each._buffers, each._modules)
    ]


def changed_in(rows):
    """Of what registered_in() returned earlier: ({name: (what was there, what is there now)}, the dictionary, what that had)."""
    for path, registered, before in rows:
        if not registered and not before:
            continue  # as most
        now = registered if isinstance(registered, dict) else dict(registered.items())  # that of TorchScript is none
        if now.keys() == before.keys() and all(map(operator.is_, map(now.get, before), before.values())):
            continue
        prefix = f"{path}." if path else ""
        names = [name for name in {**before, **now} if now.get(name) is not before.get(name)]
        yield {prefix + name: (before.get(name), now.get(name)) for name in names}, registered, before


def put_back(registered, before):
    if isinstance(registered, dict):
        registered.clear()  # which keeps their order
        registered.update(before)
    else:  # of TorchScript, where none comes or goes
        for name, value in before.items():
            registered[name] = value
