// SPDX-License-Identifier: Apache-2.0
/// @file cpu/frequent_directions.hpp  Frequent Directions: a small matrix B that approximates the
/// energy of a stream of rows A in every direction.
///
/// Source: Ghashami, Liberty, Phillips and Woodruff 2016. SubSpace-A (section 3.3 B) takes the
/// bases of its chunks from B. With l = sketch_rows, sigma the singular values of the 2 l buffered
/// rows, and delta = sigma_l^2, a step is
///
///     B <- diag(sqrt(max(sigma_i^2 - delta, 0))) V^T
///
/// and leaves at most l - 1 rows. A step removes a squared norm of delta from each of the first l
/// directions, so that
///
///     l sum(delta) <= ||A||_F^2 - ||B||_F^2
///     0 <= ||A x||^2 - ||B x||^2 <= sum(delta) <= ||A - A_k||_F^2 / (l - k)
///
/// for every unit x and every k < l, where A_k is the best rank-k approximation. This is the
/// paper's bound with m = l, r = k, and needs l > k. The error of a sketch of l = 2 k rows is at
/// most 1/k of the energy that rank k misses.
///
/// The timing of steps does not matter: the proof only needs that each step has more than l rows
/// before it and subtracts sigma_l^2. A buffer of 2 l rows makes steps rare. A cache instead steps
/// after every batch and keeps only B (StoredSketch).
#pragma once

#include <Eigen/Core>
#include <Eigen/Eigenvalues>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "lowrankkv/core/byte_stream.hpp"
#include "lowrankkv/core/error.hpp"
#include "lowrankkv/core/views.hpp"
#include "lowrankkv/linalg/eigen_matrix.hpp"
#include "lowrankkv/linalg/orthonormalize.hpp"

LOWRANKKV_NAMESPACE_BEGIN
namespace cpu {

/// @brief A sketch between two batches: B alone, in f32. Rounding changes ||B x||^2 by at most
/// 2^-22 ||B||_F^2 per batch, in either direction.
struct StoredSketch {
  int sketch_rows = 0;  ///< l
  int head_dim = 0;
  std::vector<float> rows;  ///< [held, head_dim], held <= min(sketch_rows, head_dim)
  double shrinkage = 0.0;   ///< sum of delta
  double squared_frobenius = 0.0;

  Eigen::Index held() const {
    return head_dim == 0 ? 0 : static_cast<Eigen::Index>(rows.size()) / head_dim;
  }
  /// @brief Bytes of the rows held: 4 held head_dim.
  std::size_t bytes() const { return rows.size() * sizeof(float); }
  /// @brief Writes the sketch, bit for bit.
  void write(ByteWriter& out) const {
    for (const int extent : {sketch_rows, head_dim, static_cast<int>(held())})
      out.value(static_cast<std::int32_t>(extent));
    out.value(shrinkage);
    out.value(squared_frobenius);
    out.bytes(rows.data(), bytes());
  }
  /// @brief Reads a sketch that write() wrote. @throws FormatError if its extents differ from
  /// sketch_rows and head_dim, or if it holds NaN or Inf
  static StoredSketch read(ByteReader& in, int sketch_rows, int head_dim) {
    const auto limit = in.value<std::int32_t>(), dim = in.value<std::int32_t>(),
               held = in.value<std::int32_t>();
    if (limit != sketch_rows || dim != head_dim || held < 0 || held > (std::min)(limit, dim)) {
      ::lowrankkv::detail::fail<FormatError>("saved state: a sketch of ", limit, " x ", dim,
                                             " holds ", held, " rows, expected ", sketch_rows,
                                             " x ", head_dim);
    }
    StoredSketch sketch{
        limit, dim,
        std::vector<float>(static_cast<std::size_t>(held) * static_cast<std::size_t>(dim))};
    sketch.shrinkage = in.value<double>();
    sketch.squared_frobenius = in.value<double>();
    const std::span<const std::byte> rows = in.bytes(sketch.bytes());
    if (!rows.empty()) std::memcpy(sketch.rows.data(), rows.data(), rows.size());
    bool finite = std::isfinite(sketch.shrinkage) && std::isfinite(sketch.squared_frobenius) &&
                  sketch.shrinkage >= 0.0 && sketch.squared_frobenius >= 0.0;
    for (const float value : sketch.rows) finite = finite && std::isfinite(value);
    if (!finite) {
      ::lowrankkv::detail::fail<FormatError>("saved state: a sketch of ", held,
                                             " rows and squared norm ", sketch.squared_frobenius,
                                             " is not finite, or negative");
    }
    return sketch;
  }
};

/// @brief Frequent Directions sketch of a stream of rows [., head_dim], in f64. Copyable; copies
/// are independent.
///
/// The buffer is compressed only when it is full. The state therefore depends on the rows and their
/// order, but not on how they were split into calls, nor on when the sketch was read: all readers
/// are const and work on a copy. A sketch restored from stored() also depends on when stored() was
/// called.
template <class Real>
class BasicSketch {
 public:
  /// @brief An empty sketch. @param sketch_rows l, at least 1: the most rows of B; the buffer holds
  /// twice as many
  /// @throws ShapeError unless both extents are at least 1
  BasicSketch(int sketch_rows, int head_dim) : limit_(sketch_rows), dim_(head_dim) {
    if (sketch_rows < 1)
      ::lowrankkv::detail::fail<ShapeError>("sketch_rows: at least 1, given ", sketch_rows);
    if (head_dim < 1)
      ::lowrankkv::detail::fail<ShapeError>("head_dim: at least 1, given ", head_dim);
    buffer_ = Rows::Zero(2 * Eigen::Index{sketch_rows}, head_dim);
  }
  /// @brief Continues from a stored sketch. @throws ShapeError as above
  explicit BasicSketch(const StoredSketch& stored)
      : BasicSketch(stored.sketch_rows, stored.head_dim) {
    held_ = stored.held();
    for (Eigen::Index i = 0; i < held_ * dim_; ++i)
      buffer_.data()[i] = static_cast<double>(stored.rows[static_cast<std::size_t>(i)]);
    shrinkage_ = stored.shrinkage;
    squared_frobenius_ = stored.squared_frobenius;
  }

  int sketch_rows() const { return limit_; }
  int head_dim() const { return dim_; }

  /// @brief Adds rows [n, head_dim]. Any split into calls gives the same state, bit for bit.
  /// @throws ShapeError if head_dim differs, ValueError on NaN or Inf; the sketch is then unchanged
  ///
  /// Cost: O(head_dim sketch_rows + sketch_rows^2) per row, amortised. Allocates.
  void add(MatrixView rows) {
    ::lowrankkv::detail::check_equal("head_dim", "sketch", std::int64_t{dim_}, "rows", rows.cols);
    const Rows wide = linalg::to_matrix(rows);
    // A single NaN would spread to the whole sketch and never leave it.
    for (Eigen::Index row = 0; row < wide.rows(); ++row) {
      if (!wide.row(row).allFinite())
        ::lowrankkv::detail::fail<ValueError>("sketch: row ", row, " of ", wide.rows(),
                                              " holds NaN or Inf, finite expected");
    }
    for (Eigen::Index row = 0; row < wide.rows(); ++row)
      squared_frobenius_ += wide.row(row).squaredNorm();
    append(wide);
  }

  /// @brief Makes this the sketch of both streams, with this one's rows first. The bounds above
  /// hold for their union. @throws ShapeError if head_dim or sketch_rows differ
  ///
  /// Cost: as adding 2 sketch_rows rows.
  void merge(const BasicSketch& other) {
    ::lowrankkv::detail::check_equal("head_dim", "sketch", dim_, "other", other.dim_);
    ::lowrankkv::detail::check_equal("sketch_rows", "sketch", limit_, "other", other.limit_);
    // A copy, because other may be this same sketch.
    const Rows theirs = other.buffer_.topRows(other.held_);
    squared_frobenius_ += other.squared_frobenius_;
    shrinkage_ += other.shrinkage_;
    append(theirs);
  }

  /// @brief B [<= sketch_rows, head_dim], compressed: orthogonal rows, longest first. B^T B = A^T A
  /// as long as at most sketch_rows rows were seen. Cost: O(m n min(m, n)) with m, n = buffered
  /// rows, head_dim.
  Eigen::MatrixX<Real> sketch() const { return compressed(buffer_.topRows(held_)).rows; }

  /// @brief The top right singular vectors of B, [head_dim, rank] with orthonormal columns. If B
  /// has fewer than `rank` rows, arbitrary but reproducible directions complete them. A basis of
  /// rank k < l loses at most l / (l - k) times the energy that the best subspace of rank k loses.
  /// @throws ShapeError unless 1 <= rank <= head_dim. Cost: as sketch().
  Eigen::MatrixX<Real> basis(int rank) const {
    if (rank < 1 || rank > dim_)
      ::lowrankkv::detail::fail<ShapeError>("rank: in [1, head_dim], given ", rank, ", head_dim ",
                                            dim_);
    const Eigen::MatrixX<Real> rows = sketch();
    const Eigen::Index known = (std::min)(Eigen::Index{rank}, rows.rows());
    // The rows of B are orthogonal, so QR only normalises them. For zero columns, its reflectors
    // give orthonormal columns of the complement.
    Eigen::MatrixX<Real> columns = Eigen::MatrixX<Real>::Zero(dim_, rank);
    columns.leftCols(known) = rows.topRows(known).transpose();
    return linalg::orthonormal_columns(columns);
  }

  /// @brief Sum of all delta up to and including that of sketch(): an upper bound, known at run
  /// time, on ||A^T A - B^T B||_2, in squared units of the rows. It is at most the a-priori bounds
  /// (diagnostics::fd_bound). Cost: as sketch().
  double total_shrinkage() const { return shrinkage_ + compressed(buffer_.topRows(held_)).delta; }
  /// @brief ||A||_F^2 of all rows seen.
  double squared_frobenius() const { return squared_frobenius_; }
  /// @brief The sketch in the form that is kept between batches: the buffered rows rounded to f32,
  /// or B if they are more than min(sketch_rows, head_dim), which B never exceeds. Depends on when
  /// it is called. Cost: as sketch().
  StoredSketch stored() const {
    const bool fits = held_ <= (std::min)(limit_, dim_);
    const Compressed kept =
        fits ? Compressed{buffer_.topRows(held_), 0.0} : compressed(buffer_.topRows(held_));
    return {limit_, dim_, linalg::to_row_major(kept.rows), shrinkage_ + kept.delta,
            squared_frobenius_};
  }
  /// @brief Bytes of the buffer, 16 sketch_rows head_dim: constant.
  std::size_t bytes() const { return static_cast<std::size_t>(buffer_.size()) * sizeof(double); }

 private:
  using Rows = Eigen::Matrix<Real, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  struct Compressed {
    Rows rows;
    double delta = 0.0;
  };

  void append(const Rows& rows) {
    for (Eigen::Index done = 0; done < rows.rows();) {
      const Eigen::Index count = (std::min)(rows.rows() - done, buffer_.rows() - held_);
      buffer_.middleRows(held_, count) = rows.middleRows(done, count);
      done += count;
      held_ += count;
      if (held_ < buffer_.rows()) continue;
      const Compressed smaller = compressed(buffer_);
      held_ = smaller.rows.rows();
      buffer_.topRows(held_) = smaller.rows;
      shrinkage_ += smaller.delta;
    }
  }

  /// The step of the file's header comment; for at most sketch_rows rows, the step with delta = 0.
  /// Decomposes the smaller of the two Gram matrices. The error is of the order of eps sigma_1^2,
  /// as is the error of squared singular values.
  Compressed compressed(const Eigen::Ref<const Rows>& rows) const {
    Compressed result;
    const bool by_rows = rows.rows() <= rows.cols();
    const Eigen::MatrixX<Real> gram = by_rows ? Eigen::MatrixX<Real>(rows * rows.transpose())
                                              : Eigen::MatrixX<Real>(rows.transpose() * rows);
    if (gram.size() == 0) return {Rows(0, dim_), 0.0};
    const Eigen::SelfAdjointEigenSolver<Eigen::MatrixX<Real>> solver(gram);
    const Eigen::VectorX<Real> squares = solver.eigenvalues().reverse();  // sigma^2, descending
    const Eigen::MatrixX<Real> vectors = solver.eigenvectors().rowwise().reverse();
    if (rows.rows() > limit_ && squares.size() >= limit_)
      result.delta = (std::max)(squares[limit_ - 1], 0.0);
    Eigen::Index kept = 0;
    while (kept < (std::min)(Eigen::Index{limit_}, squares.size()) && squares[kept] > result.delta)
      ++kept;
    const Eigen::ArrayX<Real> top = squares.head(kept).array();
    if (by_rows) {
      // diag(sqrt(1 - delta / sigma^2)) U^T A only contracts A, so rounding never gives B more
      // energy than A.
      const Eigen::VectorX<Real> factors = (1.0 - result.delta / top).sqrt();
      result.rows = factors.asDiagonal() * (vectors.leftCols(kept).transpose() * rows);
    } else {
      const Eigen::VectorX<Real> lengths = (top - result.delta).sqrt();
      result.rows = lengths.asDiagonal() * vectors.leftCols(kept).transpose();
    }
    return result;
  }

  int limit_;
  int dim_;
  Rows buffer_;             // [2 sketch_rows, head_dim]; the first held_ rows are valid
  Eigen::Index held_ = 0;   // below 2 sketch_rows between calls
  double shrinkage_ = 0.0;  // sum of delta so far
  double squared_frobenius_ = 0.0;
};

/// @brief The sketch in f64, the type used throughout the library.
using FrequentDirectionsSketch = BasicSketch<double>;

LOWRANKKV_COMPILED_TEMPLATE(class BasicSketch<double>)

}  // namespace cpu
LOWRANKKV_NAMESPACE_END
