//! The attribute `#[distributed_lock]`.
//!
//! Use it through `lock-runtime`, which re-exports it and holds everything that the expansion calls; this crate depends on
//! nothing of it.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod args;
mod expand;
mod function;
mod key;
mod runtime;
mod spec;

/// Runs an `async fn` under a distributed lock: one runner per key in the whole fleet.
///
/// A call waits until it holds the lock, runs the body, gives the lock back and returns what the body returned.
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
/// It stands wherever an async function can: free functions, methods with any receiver, associated functions, methods of
/// traits, native or of `#[async_trait]`, generic or not. Visibility, documentation, other attributes, spans and `Send`-ness of
/// the function stay as written. The manual's page `lock_runtime::guide::functions` shows each argument at work.
///
/// # The key
///
/// | | |
/// |---|---|
/// | `key = "order:{order_id}"` | a format string that names arguments; format specs are allowed, and `{{` for a brace |
/// | `key("order:{}:{}", shop.id, order.id)` | a format string with values, by position or by name |
/// | `key = order.lock_key()` | any other expression that is `IntoLockKey`: a `LockKey`, a `&str`, a `String` |
/// | `keys("account:{from}", "account:{to}")` | several at once, each a string, an expression or `key(..)`; all are held, or none |
/// | `keys = cart.lock_keys()` | any number of them: an expression that is `IntoIterator` |
///
/// Values are escaped on their way into a format string, so `("1:2", "3")` never meets `("1", "2:3")`; an expression is
/// taken as it is, and `format!` escapes nothing: where values come from outside, an expression makes its key by a `KeyWriter`.
/// The key is made before the body runs. A format string borrows what it names; an expression owns what it
/// moves, so write `key = &name` where the body needs `name` as well. `?` and `.await` in a value of `key(..)` are those
/// of the function.
///
/// A format string without a placeholder is the same key for every call, so that one call at a time runs in the whole fleet.
/// Whoever means that says so: `key = "nightly-report", global`. Of an expression, or of a string that names constants only, the
/// attribute cannot tell.
///
/// # Arguments
///
/// | argument | meaning | if not given |
/// |---|---|---|
/// | `lease = "30s"` | how long the store keeps the lock if this process dies, 100 ms to 24 h; a living holder renews it | 30 s |
/// | `wait = "2s"` | how long to wait for the lock, at most 24 h, then `WaitTimeout` | 10 s |
/// | `no_wait` | do not wait: `Contended` if the lock is not free | |
/// | `reentrant` | a caller that holds the key may enter again | `WouldDeadlock` |
/// | `read` | one of many readers | one holder |
/// | `write` | the only writer; the same as giving no mode | |
/// | `permits = 3` | at most so many holders, in the whole fleet | one holder |
/// | `min_hold = "5s"` | keep the lock at least so long, at most 24 h, also if the body is done sooner | |
/// | `max_hold = "5m"` | the lock is lost after so long, at most 365 days, and the body is stopped unless `on_lost = finish` | no limit |
/// | `no_renew` | the lock ends with its lease, whatever its holder does | renewed every third of the lease |
/// | `strict_order` | processes take turns: the lock is not passed on within one | passed on |
/// | `spec = self.config.lock` | a `LockSpec` from elsewhere, with the mode; what is written beside it wins | |
/// | `client = self.locks` | the `LockClient` to lock with | the one of `scope` or `install` |
/// | `guard = lock` | the body's name for its lock, a `&HeldLock`: fencing token, validity, loss | |
/// | `on_busy = skip` | if somebody else holds the lock, return `Ok(Default::default())`, `None` or `()` | the error |
/// | `on_busy = expr` | the same, with a value; only for `Contended` and `WaitTimeout` | the error |
/// | `on_lost = finish` | let the body run to its end when the lock is lost; the loss is traced as a warning | `cancel` |
/// | `map_err = path` | a `fn(LockError) -> R`, where `R` is what the function returns; a closure will do | `From<LockError>` |
/// | `crate = path` | where lock-runtime is, if not under its own name | `::lock_runtime` |
///
/// A duration is a string such as `"500ms"` or `"1m 30s"`, checked while compiling, or an expression of type `Duration`;
/// permits are a number, or an expression of type `NonZeroU32`. What is not given comes from the client's defaults; the
/// last column shows those of a client that was given none. `client` and `spec` are borrowed, and only until the lock is asked
/// for.
///
/// # What it returns
///
/// The function must be able to return a `LockError`, which tells that the lock was not to be had, or was lost. A
/// `Result` can, under any alias, if its error implements `From<LockError>`:
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
/// `std::io::Error`, `anyhow::Error` and `Box<dyn Error + Send + Sync>` can as they are, and with the feature `axum` of
/// lock-runtime so can axum's `Response`. A function that returns anything else, or nothing, says with `map_err` what to
/// return instead.
///
/// # Cancellation
///
/// When the lock is lost (the store was out of reach for a whole lease, say, or somebody revoked the key), the body is
/// dropped at the `.await` it stands at, and the function returns the `LockError`. Whatever the body changed by then stays
/// changed: **a method on `&mut self` can be left half-done**, exactly as if the caller had dropped its future. Change
/// `self` after the last `.await`, or make the change so that it can be repeated. With `on_lost = finish` the body goes on,
/// and somebody else may hold the lock by then: for work that must not be cut short and whose writes are fenced.
///
/// When the caller drops the future of the function, the body is dropped and the lock is given back in the background.
///
/// The body is dropped, with the arguments that it uses, before the lock is given back. An argument that the body never
/// names lives on until the function returns.
///
/// # Other attributes
///
/// `#[tracing::instrument]`, `#[axum::debug_handler]`, `#[cfg]`, lints and documentation go above or below. What turns the
/// function into a plain one, such as `#[tokio::test]` and `#[tokio::main]`, goes below. In an `#[async_trait]` impl the attribute
/// is on the method. A plain function whose whole body is `async move { .. }` or `Box::pin(async move { .. })` is taken like an
/// `async fn`. A crate that forbids (not denies) the lint `unreachable_code` cannot use the attribute, which allows it for a line of
/// its own.
///
/// Two of these attributes on one function are two locks, of which the lower one is taken first. `keys(..)` is better: it takes
/// them in one order everywhere.
///
/// # Cost
///
/// Beside what the runtime does for any lock, a call allocates its key and nothing else, unless it has several. The future
/// keeps an argument that the body uses once more; one of 1 KiB makes a future of less than 3.5 KiB (a plain async
/// function: 2 KiB).
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
///         Ok(entered) => cancel_on_loss(entered, async move { /* the body */ }).await,
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
