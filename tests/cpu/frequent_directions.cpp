// SPDX-License-Identifier: Apache-2.0
// Frequent Directions against its theorems.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "lowrankkv/calibrate/moments.hpp"
#include "lowrankkv/cpu/frequent_directions.hpp"
#include "lowrankkv/cpu/updater/frequent_directions.hpp"
#include "lowrankkv/diagnostics/residual_energy.hpp"
#include "lowrankkv/diagnostics/spectra.hpp"
#include "support/matrices.hpp"

namespace frequent_directions_tests {

using namespace lowrankkv;
using cpu::FrequentDirectionsSketch;
using Eigen::MatrixXd;
using Eigen::VectorXd;
using support::Random;

namespace {

/// Rows as a cache would have them: f32, row-major, with the f64 matrix of exactly these values.
struct Stream {
  explicit Stream(const MatrixXd& matrix)
      : values(support::row_major(matrix)), rows(matrix.cast<float>().cast<double>()) {}
  MatrixView view() const { return {values.data(), rows.rows(), rows.cols()}; }
  MatrixView view(std::int64_t first, std::int64_t count) const {
    return {values.data() + first * rows.cols(), count, rows.cols()};
  }
  std::vector<float> values;
  MatrixXd rows;
};

/// Streams that are hard for a sketch: what was kept is overtaken again and again, directions come
/// one at a time, or never repeat.
std::vector<Stream> streams(Random& random) {
  std::vector<Stream> all;
  all.emplace_back(support::gaussian(random, 150, 24));             // no structure
  all.emplace_back(support::decaying_rows(random, 200, 32, 0.25));  // the case it is made for
  all.emplace_back(support::decaying_rows(random, 5, 40, 0.1));     // shorter than any sketch
  all.emplace_back(support::gaussian(random, 1, 12));               // a single row
  all.emplace_back(MatrixXd::Zero(30, 8));                          // nothing at all
  all.emplace_back(MatrixXd::Identity(48, 48));  // every row a new direction of the same size
  all.emplace_back(support::gaussian(random, 100, 3));  // head_dim below sketch_rows
  all.emplace_back(support::gaussian(random, 120, 4) *
                   support::gaussian(random, 4, 30));  // exactly of rank 4
  MatrixXd growing = MatrixXd::Zero(60, 20);           // each direction overtakes all before it
  for (int i = 0; i < 60; ++i) growing(i, i % 20) = std::pow(1.15, i);
  all.emplace_back(growing);
  MatrixXd shifting(160, 24);  // a heavy subspace, then another, orthogonal one
  const MatrixXd axes = support::random_orthonormal(random, 24, 24);
  shifting.topRows(80) = 30.0 * support::gaussian(random, 80, 3) * axes.leftCols(3).transpose();
  shifting.bottomRows(80) = support::gaussian(random, 80, 21) * axes.rightCols(21).transpose();
  all.emplace_back(shifting);
  return all;
}

VectorXd squared_singular_values(const MatrixXd& rows) {
  return calibrate::principal_axes(rows.transpose() * rows).values;
}

/// Checks every inequality of the header's banner for `sketch` of `rows`; returns the error over
/// the best a-priori bound.
double check_guarantee(const FrequentDirectionsSketch& sketch, const MatrixXd& rows,
                       double precision = 1e-12) {
  const MatrixXd b = sketch.sketch();
  const double energy = rows.squaredNorm(), rounding = precision * energy + 1e-300;
  REQUIRE(b.rows() <= sketch.sketch_rows());
  const Eigen::SelfAdjointEigenSolver<MatrixXd> difference(
      rows.transpose() * rows - b.transpose() * b, Eigen::EigenvaluesOnly);
  const double error = difference.eigenvalues().maxCoeff();
  CHECK(difference.eigenvalues().minCoeff() >=
        -rounding);  // no direction has more energy than in the stream
  CHECK(error <= sketch.total_shrinkage() + rounding);
  CHECK(sketch.sketch_rows() * sketch.total_shrinkage() <= energy - b.squaredNorm() + rounding);
  CHECK(sketch.squared_frobenius() == doctest::Approx(energy).epsilon(1e-12));
  const VectorXd spectrum = squared_singular_values(rows);
  for (int k = 0; k < sketch.sketch_rows(); ++k) {
    const double bound = diagnostics::fd_bound(spectrum, sketch.sketch_rows(), k);
    CHECK(sketch.total_shrinkage() <= bound + rounding);
    if (k == 0 || k > sketch.head_dim()) continue;
    // The subspace: at most l / (l - k) times the energy that the best one misses.
    const MatrixXd basis = sketch.basis(k);
    const double missed = (rows - rows * basis * basis.transpose()).squaredNorm();
    CHECK(missed <= bound * sketch.sketch_rows() + rounding);
  }
  const double bound = diagnostics::best_fd_bound(spectrum, sketch.sketch_rows()).bound;
  return bound > 1e-6 * energy ? error / bound : 0.0;
}

}  // namespace

TEST_CASE("Frequent Directions keeps its guarantee for every k on every stream") {
  Random random(11);
  double tightest = 0.0;
  for (const Stream& stream : streams(random)) {
    for (const int limit : {1, 2, 3, 5, 8, 16, 31}) {
      FrequentDirectionsSketch sketch(limit, static_cast<int>(stream.rows.cols()));
      sketch.add(stream.view());
      tightest = std::max(tightest, check_guarantee(sketch, stream.rows));
      CHECK(sketch.bytes() == static_cast<std::size_t>(16 * limit * stream.rows.cols()));
    }
  }
  CHECK(tightest > 0.5);
  MESSAGE("largest error / best bound: ", tightest);
}

TEST_CASE("the guarantee is attained: l + 1 rows of equal length, all orthogonal") {
  // One step takes 1 out of every direction; the best bound is (l + 1) / l.
  for (const int limit : {4, 16, 60}) {
    FrequentDirectionsSketch sketch(limit, 64);
    const Stream stream(MatrixXd::Identity(limit + 1, 64));
    sketch.add(stream.view());
    CHECK(sketch.total_shrinkage() == doctest::Approx(1.0).epsilon(1e-12));
    CHECK(check_guarantee(sketch, stream.rows) ==
          doctest::Approx(limit / (limit + 1.0)).epsilon(1e-9));
  }
}

TEST_CASE("a sketch is exact as long as nothing has to go") {
  Random random(12);
  for (const auto& [n, dim, limit] :
       {std::array{6, 20, 6}, std::array{300, 5, 6}, std::array{1, 9, 1}}) {
    const Stream stream(support::gaussian(random, n, dim));
    FrequentDirectionsSketch sketch(limit, dim);
    sketch.add(stream.view());
    const MatrixXd b = sketch.sketch(), gram = stream.rows.transpose() * stream.rows;
    CHECK((b.transpose() * b - gram).norm() < 1e-12 * gram.norm());
    CHECK(sketch.total_shrinkage() == 0.0);
  }
}

TEST_CASE(
    "a sketch read after compression has orthogonal rows, longest first, and its basis is theirs") {
  Random random(13);
  const Stream stream(support::decaying_rows(random, 333, 40, 0.15));
  FrequentDirectionsSketch sketch(12, 40);
  sketch.add(stream.view());
  const MatrixXd b = sketch.sketch();
  const MatrixXd products = b * b.transpose();
  CHECK((products - MatrixXd(products.diagonal().asDiagonal())).cwiseAbs().maxCoeff() <
        1e-12 * products.norm());
  for (int i = 1; i < b.rows(); ++i) CHECK(products(i, i) <= products(i - 1, i - 1));
  const MatrixXd axes = calibrate::principal_axes(b.transpose() * b).vectors;
  for (const int rank : {1, 4, 9}) {
    CHECK(diagnostics::principal_angles(sketch.basis(rank), axes.leftCols(rank)).maxCoeff() < 1e-9);
  }
}

TEST_CASE("a basis of a sketch with fewer rows is completed, orthonormal and always the same") {
  Random random(14);
  const Stream stream(support::gaussian(random, 3, 10));
  FrequentDirectionsSketch sketch(5, 10), again(5, 10);
  for (int rank = 1; rank <= 10; ++rank)
    CHECK(sketch.basis(rank) == MatrixXd::Identity(10, rank));  // no rows at all
  sketch.add(stream.view());
  again.add(stream.view());
  for (int rank = 1; rank <= 10; ++rank) {
    const MatrixXd basis = sketch.basis(rank);
    CHECK((basis.transpose() * basis - MatrixXd::Identity(rank, rank)).cwiseAbs().maxCoeff() <
          1e-13);
    CHECK(basis == again.basis(rank));
    if (rank >= 3) CHECK(diagnostics::residual_energy_ratio(stream.rows, basis) < 1e-25);
  }
}

TEST_CASE("streaming in pieces equals the whole, bit for bit, and reading changes nothing") {
  Random random(15);
  for (int round = 0; round < 20; ++round) {
    const int dim = std::uniform_int_distribution<int>(1, 40)(random),
              limit = std::uniform_int_distribution<int>(1, 12)(random);
    const int n = std::uniform_int_distribution<int>(1, 200)(random);
    const Stream stream(support::decaying_rows(random, n, dim, 0.1));
    FrequentDirectionsSketch whole(limit, dim), pieces(limit, dim), single(limit, dim);
    whole.add(stream.view());
    for (int at = 0, count = 0; at < n; at += count) {
      count = std::min(std::uniform_int_distribution<int>(0, 30)(random), n - at);
      pieces.add(stream.view(at, count));
      if (round % 2 == 0) (void)pieces.basis(1);
    }
    for (int at = 0; at < n; ++at) single.add(stream.view(at, 1));
    CHECK(whole.sketch() == pieces.sketch());
    CHECK(whole.sketch() == single.sketch());
    CHECK(whole.total_shrinkage() == pieces.total_shrinkage());
    CHECK(whole.total_shrinkage() == single.total_shrinkage());
    CHECK(whole.squared_frobenius() == single.squared_frobenius());
  }
  // Rows with a stride: the padding is never read.
  std::vector<float> padded(4 * 6, std::numeric_limits<float>::quiet_NaN());
  const Stream stream(support::gaussian(random, 4, 5));
  for (int i = 0; i < 4; ++i) std::copy_n(stream.values.begin() + i * 5, 5, padded.begin() + i * 6);
  FrequentDirectionsSketch dense(2, 5), strided(2, 5);
  dense.add(stream.view());
  strided.add({padded.data(), 4, 5, 6});
  CHECK(dense.sketch() == strided.sketch());
}

TEST_CASE("merged sketches keep the guarantee of the joined stream, copies stay apart") {
  Random random(16);
  for (const int limit : {2, 5, 12}) {
    const Stream all(support::gaussian(random, 240, 30) *
                     (VectorXd::LinSpaced(30, 2.0, 0.1)).asDiagonal());
    std::vector<FrequentDirectionsSketch> parts(3, FrequentDirectionsSketch(limit, 30));
    parts[0].add(all.view(0, 100));
    parts[1].add(all.view(100, 17));
    parts[2].add(all.view(117, 123));
    const MatrixXd before = parts[0].sketch();
    FrequentDirectionsSketch merged = parts[0];
    merged.merge(parts[1]);
    merged.merge(parts[2]);
    check_guarantee(merged, all.rows);
    CHECK(parts[0].sketch() == before);

    FrequentDirectionsSketch twice = parts[1];
    twice.merge(twice);
    MatrixXd doubled(34, 30);
    doubled << all.rows.middleRows(100, 17), all.rows.middleRows(100, 17);
    check_guarantee(twice, doubled);
  }
}

TEST_CASE(
    "a sketch that is stored after every batch keeps the guarantee, up to rounding to f32, and "
    "min(l, head_dim) rows") {
  Random random(17);
  for (const Stream& stream : streams(random)) {
    const int n = static_cast<int>(stream.rows.rows()), dim = static_cast<int>(stream.rows.cols());
    for (const int limit : {1, 2, 5, 16, 31}) {
      for (const int batch : {1, 7, 32, 90}) {
        cpu::StoredSketch stored{limit, dim, {}};
        CHECK(stored.bytes() == 0);
        for (int at = 0; at < n; at += batch) {
          FrequentDirectionsSketch sketch(stored);
          sketch.add(stream.view(at, std::min(batch, n - at)));
          stored = sketch.stored();
          CHECK(stored.held() <= std::min(limit, dim));
          CHECK(stored.bytes() == static_cast<std::size_t>(4 * stored.held() * dim));
        }
        check_guarantee(FrequentDirectionsSketch(stored), stream.rows, 1e-6);
        if (n <= std::min(limit, dim))
          CHECK(stored.rows == stream.values);  // nothing was rounded, nothing rotated
      }
    }
  }
}

TEST_CASE("a stored sketch is read as it was written, and nothing else is taken for one") {
  Random random(18);
  const Stream stream(support::decaying_rows(random, 90, 20, 0.1));
  FrequentDirectionsSketch sketch(6, 20);
  sketch.add(stream.view());
  const cpu::StoredSketch stored = sketch.stored();
  ByteWriter count;
  stored.write(count);
  std::vector<std::byte> bytes(count.size());
  ByteWriter out{bytes};
  stored.write(out);
  ByteReader in{bytes};
  const cpu::StoredSketch again = cpu::StoredSketch::read(in, 6, 20);
  CHECK(again.rows == stored.rows);
  CHECK(again.shrinkage == stored.shrinkage);
  CHECK(again.squared_frobenius == sketch.squared_frobenius());
  CHECK(again.shrinkage == sketch.total_shrinkage());
  ByteReader other{bytes};
  CHECK_THROWS_WITH_AS(cpu::StoredSketch::read(other, 5, 20),
                       doctest::Contains("saved state: a sketch of 6 x 20 holds "), FormatError);
  bytes[8] = std::byte{7};  // rows held
  ByteReader many{bytes};
  CHECK_THROWS_WITH_AS(cpu::StoredSketch::read(many, 6, 20),
                       "saved state: a sketch of 6 x 20 holds 7 rows, expected 6 x 20",
                       FormatError);
  bytes[8] = static_cast<std::byte>(stored.held());
  bytes[bytes.size() - 1] = std::byte{0x7f};
  bytes[bytes.size() - 2] = std::byte{0xff};
  ByteReader poisoned{bytes};
  CHECK_THROWS_WITH_AS(cpu::StoredSketch::read(poisoned, 6, 20),
                       doctest::Contains(" is not finite"), FormatError);
}

TEST_CASE("a key above its threshold ends the chunk of values too, if asked") {
  using Updater = Impl<FrequentDirections, Cpu>;
  constexpr int dim = 12, rank = 3;
  Random random(19);
  const Stream stream(support::decaying_rows(random, 30, dim, 0.1));
  std::vector<float> axes(dim * rank), moved(dim * rank);
  for (int i = 0; i < rank; ++i) axes[static_cast<std::size_t>(i * rank + i)] = 1.0F;
  const MatrixView basis(axes.data(), dim, rank);
  for (const bool ends_both : {false, true}) {
    for (const bool by_key : {false, true}) {
      const FrequentDirections policy{.ends_both = ends_both};
      const auto started = [&](Part part) {
        const bool low = (part == Part::key) == by_key;
        return Updater::start(policy, {dim, rank, part, low ? 1e-3F : 1e6F});
      };
      auto keys = started(Part::key), values = started(Part::value);
      for (auto* state : {&keys, &values})
        Updater::observe(policy, *state, stream.view(0, 20), basis, Phase::decode);
      Updater::join(policy, keys, values);
      const auto ends = [&](auto& state) {
        return Updater::maybe_update(policy, state, basis, {moved.data(), dim, rank},
                                     Phase::decode);
      };
      CHECK(ends(keys) == (by_key || ends_both));
      CHECK(ends(values) == (!by_key || ends_both));
      CHECK(!ends(keys));  // a new chunk has begun
    }
  }
}

TEST_CASE("a sketch refuses misfits and poison, and stays as it was") {
  FrequentDirectionsSketch sketch(3, 4);
  std::vector<float> rows(8, 1.0F);
  sketch.add({rows.data(), 2, 4});
  const MatrixXd before = sketch.sketch();
  CHECK_THROWS_WITH_AS(sketch.add({rows.data(), 1, 8}), "head_dim: sketch 4, rows 8", ShapeError);
  rows[5] = std::numeric_limits<float>::quiet_NaN();
  CHECK_THROWS_WITH_AS(sketch.add({rows.data(), 2, 4}),
                       "sketch: row 1 of 2 holds NaN or Inf, finite expected", ValueError);
  CHECK_THROWS_WITH_AS(sketch.merge(FrequentDirectionsSketch(3, 5)), "head_dim: sketch 4, other 5",
                       ShapeError);
  CHECK_THROWS_WITH_AS(sketch.merge(FrequentDirectionsSketch(2, 4)),
                       "sketch_rows: sketch 3, other 2", ShapeError);
  CHECK_THROWS_WITH_AS(sketch.basis(5), "rank: in [1, head_dim], given 5, head_dim 4", ShapeError);
  CHECK_THROWS_AS(sketch.basis(0), ShapeError);
  CHECK_THROWS_WITH_AS(FrequentDirectionsSketch(0, 4), "sketch_rows: at least 1, given 0",
                       ShapeError);
  CHECK_THROWS_AS(FrequentDirectionsSketch(4, 0), ShapeError);
  CHECK(sketch.sketch() == before);
  CHECK(sketch.squared_frobenius() == 8.0);
}

}  // namespace frequent_directions_tests
