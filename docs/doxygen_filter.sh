#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Headers by their whole path; links between files of the repository as links to pages, pictures by their path from the root.
exec sed -e 's#@file \([a-z]\)#@file lowrankkv/\1#' -e 's#\[CONTRIBUTING.md\](CONTRIBUTING.md)#CONTRIBUTING.md#' -e 's#\[\([^]]*\)\](\.\./bench/results/README.md)#\1#' -e 's#](\(\.\./\)\{1,2\}bench/#](bench/#g' "$1"
