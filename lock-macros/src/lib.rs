//! The attribute `#[distributed_lock]`.
//!
//! Use it through `lock-runtime`, which re-exports it and contains everything that the expansion
//! calls. This crate does not depend on lock-runtime.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod args;
mod expand;
mod function;
mod key;
mod runtime;
mod spec;

/// Runs an `async fn` under a distributed lock: one call per key at a time, across all processes.
///
/// A call waits until it holds the lock, runs the body, releases the lock and returns the result
/// of the body.
///
/// ```text
/// use lock_runtime::distributed_lock;
///
/// #[distributed_lock(key = "order:{order_id}", lease = "30s", wait = "2s")]
/// async fn pay(order_id: u64) -> Result<Receipt, PayError> {
///     charge(order_id).await
/// }
/// ```
///
/// The attribute works on all async functions: free functions, methods with any receiver,
/// associated functions, trait methods, native or of `#[async_trait]`, generic or not. It
/// preserves the visibility, documentation, other attributes, spans and `Send`-ness of the
/// function. The page `lock_runtime::guide::functions` of the guide has an example for each
/// argument.
///
/// # The key
///
/// | argument | meaning |
/// |---|---|
/// | `key = "order:{order_id}"` | a format string that captures arguments of the function |
/// | `key("order:{}:{}", shop.id, order.id)` | a format string with positional or named values |
/// | `key = order.lock_key()` | any other `IntoLockKey` expression: a `LockKey`, `&str`, `String` |
/// | `keys("account:{from}", "account:{to}")` | several keys; all are held, or none |
/// | `keys = cart.lock_keys()` | any number of keys: an `IntoIterator` expression |
///
/// Format specs are allowed, and `{{` stands for a brace. Each entry of `keys(..)` is a string,
/// an expression or `key(..)`.
///
/// Values are escaped when they are inserted into a format string, so `("1:2", "3")` never gives
/// the same key as `("1", "2:3")`. Expressions are used unchanged, and `format!` escapes nothing:
/// if a key contains external values, build it with a `KeyWriter`. The key is built before the
/// body runs. A format string borrows its values. An expression owns the values that it moves, so
/// write `key = &name` if the body needs `name` as well. `?` and `.await` in a value of `key(..)`
/// belong to the function.
///
/// A format string without a placeholder gives every call the same key, so one call at a time
/// runs across all processes. Confirm this with `global`: `key = "nightly-report", global`. The
/// attribute cannot check this for expressions, or for strings that only name constants.
///
/// # Arguments
///
/// | argument | meaning | default |
/// |---|---|---|
/// | `lease = "30s"` | how long the store keeps the lock if this process dies | 30 s |
/// | `wait = "2s"` | how long to wait for the lock, then `WaitTimeout` | 10 s |
/// | `no_wait` | do not wait: `Contended` if the lock is not free | |
/// | `reentrant`, `no_reentrant` | a caller that holds the key may enter again | `WouldDeadlock` |
/// | `exclusive` | one holder, as a writer; the same as no mode | |
/// | `shared` | one of many holders, as a reader | one holder |
/// | `permits = 3` | at most this many holders, across all processes | one holder |
/// | `min_hold = "5s"` | keep the lock at least this long, even if the body ends earlier | |
/// | `max_hold = "5m"`, `no_max_hold` | the lock is lost after this long | no limit |
/// | `no_renew`, `renew` | the lock ends with its lease | renewed every third of the lease |
/// | `strict_order`, `no_strict_order` | processes take turns | local hand-offs |
/// | `retain = "50ms"` | keep the lock for its next use here, unless another process wants it | |
/// | `max_waiters = 100` | more waiting callers in this process are `Overloaded` | 10 000 |
/// | `once = "48h"` | run once per key: keep the `Ok` value, and return it to later calls | |
/// | `spec = self.config.lock` | a `LockSpec`; other options override it, a mode is refused | |
/// | `client = self.locks` | the `LockClient` to use | the one of `as_default` or `install` |
/// | `name = "checkout"` | the name in metrics, traces and errors | the path of the function |
/// | `held = lock` | the name of the lock in the body, a `&HeldLock` | |
/// | `on_busy = skip` | return `Ok(Default::default())`, `None` or `()` if it is held | the error |
/// | `on_busy = expr` | return this value if the lock is held | the error |
/// | `on_lost = error` | if the lock is lost, run the body to its end, then fail | `cancel` |
/// | `on_lost = ignore` | the same, but return the result of the body | `cancel` |
/// | `map_err = path` | a `fn(LockError) -> R`, if the function returns `R` | `From<LockError>` |
/// | `crate = path` | the path of lock-runtime, if it has another name | `::lock_runtime` |
///
/// - A lease is 100 ms to 24 h, and a live holder renews it. `wait` and `min_hold` are at most
///   24 h, `max_hold` at most 365 days. After `max_hold`, the lock is lost.
/// - With `once`, the function returns a `Result` whose value is kept as JSON (feature `serde` of
///   lock-runtime; `Result<(), E>` needs none). An error, a panic or a loss keeps nothing. Use one
///   `key`, and no `shared`, `permits`, `reentrant` or `min_hold`. See
///   `lock_runtime::LockClient::once`.
/// - `held` gives access to the fencing token, the validity and the loss of the lock.
/// - `on_busy` applies to `Contended` and `WaitTimeout` only: not to `Blocked`, which says nothing
///   about a holder.
/// - `on_lost` also accepts an expression of type `OnLost`. A loss is traced as a warning, and a
///   body that ends after it as another one.
/// - `map_err` also accepts a closure.
///
/// A duration is a string such as `"500ms"` or `"1m 30s"`, checked at compile time, or an
/// expression of type `Duration`. Permits are a number, or an expression of type `NonZeroU32`;
/// `max_waiters` is a number, or an expression of type `usize`. Unset options come from the
/// client's defaults; the last column shows those of a client without any. The second name of a
/// pair, such as `no_reentrant`, restores the behavior of the last column if the defaults or the
/// `spec` change it. `client` and `spec` are borrowed only until the acquire attempt begins.
///
/// # Return types
///
/// The function must be able to return a `LockError`, if the lock is not acquired or is lost. A
/// `Result`, under any alias, can hold it if its error implements `From<LockError>`:
///
/// ```text
/// #[derive(Debug, thiserror::Error)]
/// enum PayError {
///     #[error(transparent)]
///     Lock(#[from] lock_runtime::LockError),
///     #[error("the card was declined")]
///     Declined,
/// }
/// ```
///
/// `std::io::Error`, `anyhow::Error` and `Box<dyn Error + Send + Sync>` implement it, and with
/// the feature `axum` of lock-runtime, axum's `Response` can hold it as well. A function that
/// returns any other type, or nothing, needs `map_err` to produce its return value.
///
/// # Cancellation
///
/// If the lock is lost (for example because the store is unavailable for a whole lease, or the
/// key is revoked), the body is dropped at its current `.await`, and the function returns the
/// `LockError`. Changes that the body made before that stay: **a method on `&mut self` can be
/// left half-done**, exactly as if the caller had dropped its future. Change `self` after the
/// last `.await`, or make the change repeatable. With `on_lost = error` or `ignore` the body
/// continues, while another holder may have the lock. Use them for work that must not be
/// interrupted and whose writes are fenced.
///
/// A body that does not reach an `.await` cannot be stopped. If it ends after the loss, the
/// function returns the `LockError` as well, unless `on_lost` is `ignore`, or the body returns an
/// error: its own error is worth more. The same applies if the store replies to the release that
/// the lock was no longer held.
///
/// If the caller drops the future of the function, the body is dropped and the lock is released
/// in the background.
///
/// The body is dropped before the release, together with the arguments that it uses. An argument
/// that the body does not mention is dropped when the function returns.
///
/// # Other attributes
///
/// `#[tracing::instrument]`, `#[axum::debug_handler]`, `#[cfg]`, lints and documentation may be
/// above or below this attribute. An attribute that makes the function a plain one, such as
/// `#[tokio::test]` or `#[tokio::main]`, must be below it. In an `#[async_trait]` impl the
/// attribute belongs on the method. A plain function whose whole body is `async move { .. }` or
/// `Box::pin(async move { .. })` is treated like an `async fn`. A crate that forbids (not denies)
/// the lint `unreachable_code` cannot use the attribute, because the expansion allows it for one
/// line.
///
/// Two of these attributes on one function are two locks; the lower one is acquired first. Prefer
/// `keys(..)`, which acquires keys in the same order everywhere.
///
/// # Cost
///
/// Apart from the work of the runtime for any lock, a call allocates its key and nothing else,
/// unless it has several keys. The future contains one more copy of each argument that the body
/// uses: with an argument of 1 KiB it is smaller than 3.5 KiB (2 KiB for a plain async function).
///
/// # Expansion
///
/// ```text
/// async fn pay(order_id: u64) -> Result<Receipt, PayError> {
///     let client = ambient();
///     let request = one(
///         client,
///         key(|k| { k.lit("order:").arg(format_args!("{order_id}")); }),
///         const { LockSpec::exclusive().lease(..).wait(..) },
///     );
///     let outcome = match enter(request).await {
///         Ok(entered) => run(entered, async move { /* the body */ }, is_failure).await,
///         Err(error) => Err(error),
///     };
///     match outcome {
///         Ok(returned) => returned,
///         Err(error) => FromLockError::from_lock_error(error),
///     }
/// }
/// ```
#[proc_macro_attribute]
pub fn distributed_lock(
    args: proc_macro::TokenStream,
    item: proc_macro::TokenStream,
) -> proc_macro::TokenStream {
    expand::expand(args.into(), item.into()).into()
}
