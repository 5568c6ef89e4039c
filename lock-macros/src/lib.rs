//! The attribute `#[distributed_lock]`.
//!
//! Use it through `lock-runtime`, which re-exports it and holds everything that the expansion calls; this crate depends on
//! nothing of it.

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
/// It stands on free functions and on methods with any receiver, generic or not. Visibility, documentation, other
/// attributes and `Send`-ness of the function stay as written.
///
/// # The key
///
/// | | |
/// |---|---|
/// | `key = "order:{order_id}"` | a format string that names arguments; format specs are allowed, and `{{` for a brace |
/// | `key("order:{}:{}", shop.id, order.id)` | a format string with values, by position or by name |
/// | `key = order.lock_key()` | any other expression that is `IntoLockKey`: a `LockKey`, a `&str`, a `String` |
///
/// Values are escaped on their way into a format string, so `("1:2", "3")` never meets `("1", "2:3")`; an expression is
/// taken as it is. The key is made before the body runs. A format string borrows what it names; an expression owns what it
/// moves, so write `key = &name` where the body needs `name` as well. `?` and `.await` in a value of `key(..)` are those
/// of the function.
///
/// # Arguments
///
/// | argument | meaning | if not given |
/// |---|---|---|
/// | `lease = "30s"` | how long the store keeps the lock if this process dies, 100 ms to 24 h; a living holder renews it | 30 s |
/// | `wait = "2s"` | how long to wait for the lock, then `WaitTimeout` | 10 s |
/// | `no_wait` | do not wait: `Contended` if the lock is not free | |
/// | `reentrant` | a caller that holds the key may enter again | `WouldDeadlock` |
/// | `read` | one of many readers | one holder |
/// | `write` | the only writer; the same as giving no mode | |
/// | `permits = 3` | at most so many holders, in the whole fleet | one holder |
/// | `min_hold = "5s"` | keep the lock at least so long, also if the body is done sooner | |
/// | `max_hold = "5m"` | the lock is lost after so long, and the body stopped | no limit |
/// | `client = self.locks` | the `LockClient` to lock with | the one of `scope` or `install` |
///
/// A duration is a string such as `"500ms"` or `"1m 30s"`, checked while compiling, or an expression of type `Duration`;
/// permits are a number, or an expression of type `NonZeroU32`. What is not given comes from the client's defaults; the
/// last column shows those of a client that was given none.
///
/// # What it returns
///
/// The function must be able to return a `LockError`, which tells that the lock was not to be had, or was lost. A
/// `Result` can, if its error implements `From<LockError>`:
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
/// `std::io::Error` and `Box<dyn Error + Send + Sync>` can as they are.
///
/// # Cancellation
///
/// When the lock is lost (the store was out of reach for a whole lease, say, or somebody revoked the key), the body is
/// dropped at the `.await` it stands at, and the function returns the `LockError`. Whatever the body changed by then stays
/// changed: **a method on `&mut self` can be left half-done**, exactly as if the caller had dropped its future. Change
/// `self` after the last `.await`, or make the change so that it can be repeated.
///
/// When the caller drops the future of the function, the body is dropped and the lock is given back in the background.
///
/// The body is dropped, with the arguments that it uses, before the lock is given back. An argument that the body never
/// names lives on until the function returns.
///
/// # Expansion
///
/// ```text
/// async fn pay(order_id: u64) -> Result<Receipt, PayError> {
///     let client = ambient();
///     let key = key(|k| { k.lit("order:").arg(format_args!("{order_id}")); });
///     let spec = const { &LockSpec::exclusive().lease(..).wait(..) };
///     let outcome = match enter(client, key, spec).await {
///         Ok(entered) => entered.cancel_on_loss(async move { /* the body */ }).await,
///         Err(error) => Err(error),
///     };
///     match outcome {
///         Ok(returned) => returned,
///         Err(error) => FromLockError::from_lock_error(error),
///     }
/// }
/// ```
#[proc_macro_attribute]
pub fn distributed_lock(args: proc_macro::TokenStream, item: proc_macro::TokenStream) -> proc_macro::TokenStream {
    expand::expand(args.into(), item.into()).into()
}
