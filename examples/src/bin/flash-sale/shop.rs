//! The shop: two routes, and the critical section of the example.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use axum::{
    Router,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use lock_runtime::{LockClient, LockError, distributed_lock};
use tokio::task::yield_now;

use crate::stock::Stock;

/// One server's view of the shop. Clones share everything.
#[derive(Clone)]
pub(crate) struct Shop {
    pub(crate) stock: Stock,
    /// `None` to sell without a lock.
    pub(crate) locks: Option<LockClient>,
    /// The number of sales of this server.
    pub(crate) sold: Arc<AtomicU64>,
}

/// The result of an attempt to buy.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Sale {
    Sold,
    SoldOut,
}

/// The reason for a failed attempt to buy.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("unknown_item: we do not sell that")]
    UnknownItem,
    #[error("{}: {_0:#}", _0.code())]
    Lock(#[from] LockError),
    #[error("stock: {_0:#}")]
    Stock(#[from] anyhow::Error),
    /// The lock was lost before the transaction of the sale.
    #[cfg(feature = "postgres")]
    #[error("guard: {_0:#}")]
    Guard(#[source] anyhow::Error),
}

/// `POST /buy/{item}` sells one piece, `GET /stock/{item}` returns the number of pieces left.
pub(crate) fn routes(shop: Shop) -> Router {
    Router::new()
        .route("/buy/{item}", post(buy))
        .route("/stock/{item}", get(left))
        .with_state(shop)
}

async fn buy(State(shop): State<Shop>, Path(item): Path<String>) -> Result<Sale, Refusal> {
    let sale = match &shop.locks {
        Some(locks) => sell(locks, &shop.stock, &item).await?,
        None => sell_without_lock(&shop.stock, &item).await?,
    };
    if let Sale::Sold = sale {
        shop.sold.fetch_add(1, Ordering::Relaxed);
    }
    Ok(sale)
}

/// All customers want the same item, so all of them wait in one queue. The wait is that of a
/// patient customer.
#[distributed_lock(key = "stock:{item}", wait = "60s", client = locks, held = lock)]
async fn sell(locks: &LockClient, stock: &Stock, item: &str) -> Result<Sale, Refusal> {
    match (stock, lock) {
        // PostgreSQL refuses a sale whose lock was lost.
        #[cfg(feature = "postgres")]
        (Stock::Postgres(stock), lock) => stock.sell(item, lock).await,
        _ => sell_without_lock(stock, item).await,
    }
}

/// A read, a pause, a write. Two concurrent calls read the same number and sell the same piece.
async fn sell_without_lock(stock: &Stock, item: &str) -> Result<Sale, Refusal> {
    let left = stock.left(item).await?.ok_or(Refusal::UnknownItem)?;
    yield_now().await;
    let Some(left) = left.checked_sub(1) else {
        return Ok(Sale::SoldOut);
    };
    stock.write(item, left).await?;
    Ok(Sale::Sold)
}

async fn left(State(shop): State<Shop>, Path(item): Path<String>) -> Result<String, Refusal> {
    let left = shop.stock.left(&item).await?.ok_or(Refusal::UnknownItem)?;
    Ok(format!("{left}\n"))
}

impl IntoResponse for Sale {
    fn into_response(self) -> Response {
        match self {
            Self::Sold => (StatusCode::OK, "sold\n"),
            Self::SoldOut => (StatusCode::GONE, "sold out\n"),
        }
        .into_response()
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = match self {
            Self::UnknownItem => StatusCode::NOT_FOUND,
            Self::Lock(_) | Self::Stock(_) => StatusCode::SERVICE_UNAVAILABLE,
            #[cfg(feature = "postgres")]
            Self::Guard(_) => StatusCode::CONFLICT,
        };
        (status, format!("{self}\n")).into_response()
    }
}
