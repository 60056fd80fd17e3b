"""Rows of a test that are run."""


def chosen(request, *arguments):
    """Rows of a file that are run: values of one argument of its tests, or tuples of several."""
    found = []
    for item in request.session.items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if item.path == request.path and {*arguments} <= {*params}:
            values = [params[argument] for argument in arguments]
            found.append(values[0] if len(values) == 1 else (*values,))
    return found
