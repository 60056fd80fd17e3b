#!/usr/bin/env bash
# The documentation as a site: bash launch/site.sh
# Installs what it needs first, in an environment of its own (Python 3.11 or newer). A link that leads
# nowhere, or a page that no menu has, is an error.
#
# Environment variables:
#   OUTPUT  folder of the site (default: out/site)
# Arguments are passed on to `mkdocs build`.

VENV=${VENV:-$(dirname "${BASH_SOURCE[0]}")/../.venv-site}
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
make_environment
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c "$pins" -r "$root/docs/site/mkdocs.txt"
mkdir -p "${OUTPUT:=out/site}"
exec "$VENV/bin/python" -m mkdocs build --strict --config-file "$root/docs/site/mkdocs.yml" \
    --site-dir "$(cd "$OUTPUT" && pwd)" "$@"
