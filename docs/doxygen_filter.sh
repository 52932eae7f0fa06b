#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Headers by their whole path; links between files of the repository as links to pages.
exec sed -e 's#@file \([a-z]\)#@file lowrankkv/\1#' -e 's#\[CONTRIBUTING.md\](CONTRIBUTING.md)#CONTRIBUTING.md#' "$1"
