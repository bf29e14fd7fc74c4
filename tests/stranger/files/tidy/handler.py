from fleetstart.runtime import function


@function(requirements=["python-slugify==8.0.4"])
def tidy(title: str) -> str:
    from slugify import slugify

    return slugify(title)
