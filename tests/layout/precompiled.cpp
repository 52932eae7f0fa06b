// SPDX-License-Identifier: Apache-2.0
// The source of lowrankkv_test_headers, whose precompiled header tests use. There is nothing in it.
