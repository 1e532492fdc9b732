"""Every module of a service is either an edge or held to the rules of the domain.

import-linter checks the modules that pyproject.toml names; this test fails for a module that nobody named.
"""

import tomllib

DOMAIN_CONTRACT = "Domain modules do no I/O, read no clock and throw no dice"

# The first part of a module's name inside its service. Everything else is domain.
EDGES = {
    *("__main__", "service", "migrate", "settings", "metrics"),  # what puts the parts together
    *("upkeep", "housekeeping", "layouts"),  # and keeps them going
    *("app", "api", "http_server", "http_protocol"),  # requests and jobs come in here
    *("grpc_api", "coordinator_api", "job_source"),
    *("turns", "wire"),  # become messages here
    *("links", "store", "migrations"),  # and go out here
}


def is_edge(module: str) -> bool:
    return module in EDGES or module.endswith("_client")


def contract(repository, name):
    settings = tomllib.loads((repository.root / "pyproject.toml").read_text())["tool"]["importlinter"]
    return next(contract for contract in settings["contracts"] if contract["name"] == name)


def domain_modules(repository) -> set[str]:
    found = set()
    for path in repository.shipped():
        parts = path.relative_to(repository.root).with_suffix("").parts
        if parts[0] == "services" and parts[4] != "__init__" and not is_edge(parts[4]):
            found.add(".".join(parts[3:5]))
    return found


def test_every_domain_module_is_held_to_the_rules(repository):
    named = {module for module in contract(repository, DOMAIN_CONTRACT)["source_modules"]}
    services = {f"shoal_{service}" for service in repository.services()}
    assert {module for module in named if module.split(".")[0] in services} == domain_modules(repository)
