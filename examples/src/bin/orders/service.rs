//! The order service. It uses only the fencing token of its lock, with each change: the locked
//! routes, the options and the refusals are in `locks.toml`.

use std::{
    collections::HashMap,
    convert::Infallible,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::{Path, State},
    http::StatusCode,
    routing::{get, post},
};
use futures_util::{StreamExt, stream};
use lock_runtime::{FencingToken, HeldLock, LockClient};
use lock_tower::{LockPolicies, PolicyLayer};
use tokio::time::sleep;

/// The time that a charge by the bank takes.
const CHARGE: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
struct Order {
    paid: bool,
    note: String,
    /// The latest token that was presented with a change.
    fence: Option<FencingToken>,
}

/// All orders, and the number of charges by the bank.
#[derive(Clone, Debug, Default)]
pub(crate) struct Orders(Arc<Mutex<Ledger>>);

#[derive(Debug, Default)]
struct Ledger {
    orders: HashMap<u64, Order>,
    charges: u64,
}

impl Orders {
    pub(crate) fn charges(&self) -> u64 {
        self.ledger().charges
    }

    /// Charges a customer, which cannot be undone.
    async fn charge(&self) {
        self.ledger().charges += 1;
        sleep(CHARGE).await;
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes an order, unless a change with a later token has been made.
    fn change<T>(
        &self,
        id: u64,
        fence: FencingToken,
        change: impl FnOnce(&mut Order) -> T,
    ) -> Result<T, StatusCode> {
        let mut ledger = self.ledger();
        let order = ledger.orders.entry(id).or_default();
        if order.fence > Some(fence) {
            return Err(StatusCode::PRECONDITION_FAILED);
        }
        order.fence = Some(fence);
        Ok(change(order))
    }
}

/// The service with its lock policies.
pub(crate) fn app(orders: Orders, locks: LockClient, policies: LockPolicies) -> Router {
    Router::new()
        .route("/orders/{id}/pay", post(pay))
        .route("/orders/{id}", get(look).put(note).delete(cancel))
        .route("/reports/{month}", get(report))
        .route("/health", get(async || "well"))
        .layer(PolicyLayer::new(locks, policies))
        .with_state(orders)
}

/// Checks whether the order is paid, charges the customer and records the payment: without the
/// lock, two concurrent requests would charge twice. The fencing token protects the ledger in any
/// case, but the bank does not know it, so the charge relies on the lock.
async fn pay(
    State(orders): State<Orders>,
    Path(id): Path<u64>,
    lock: HeldLock,
) -> Result<String, StatusCode> {
    if orders.change(id, lock.fence(), |order| order.paid)? {
        return Ok(format!("order {id} was paid before"));
    }
    orders.charge().await;
    orders.change(id, lock.fence(), |order| order.paid = true)?;
    Ok(format!("order {id} is paid"))
}

async fn note(
    State(orders): State<Orders>,
    Path(id): Path<u64>,
    lock: HeldLock,
    note: String,
) -> Result<(), StatusCode> {
    orders.change(id, lock.fence(), |order| order.note = note)
}

async fn cancel(
    State(orders): State<Orders>,
    Path(id): Path<u64>,
    lock: HeldLock,
) -> Result<(), StatusCode> {
    orders.change(id, lock.fence(), |order| {
        *order = Order {
            fence: order.fence,
            ..Order::default()
        }
    })
}

async fn look(State(orders): State<Orders>, Path(id): Path<u64>) -> Result<String, StatusCode> {
    let ledger = orders.ledger();
    let order = ledger.orders.get(&id).ok_or(StatusCode::NOT_FOUND)?;
    Ok(format!(
        "order {id}: paid={} note={:?}",
        order.paid, order.note
    ))
}

/// A report that is generated while it is sent.
async fn report(Path(month): Path<String>) -> Body {
    let lines = stream::iter(1..=3).then(move |line| {
        let text = format!("{month}, line {line} of 3\n");
        async move {
            sleep(CHARGE).await;
            Ok::<_, Infallible>(text)
        }
    });
    Body::from_stream(lines)
}
