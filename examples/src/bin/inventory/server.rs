//! The server: an ordinary tonic service behind a lock layer.

use std::{sync::Arc, time::Duration};

use futures_util::{
    StreamExt,
    stream::{self, BoxStream},
};
use lock_examples::inventory::{
    Item, Pieces as Wanted, Place, Quantity,
    inventory_server::{Inventory, InventoryServer},
};
use lock_runtime::{FencingToken, HeldLock, LockClient};
use lock_tower::{HoldUntil, LockLayer};
use tokio::{task::yield_now, time::sleep};
use tonic::{
    Request, Response, Status,
    transport::{Server, server::TcpIncoming},
};

use crate::stock::{Pieces, Stale, Stock};

/// How long a request waits for the lock before it is refused, and the delay of a retry.
const WAIT: Duration = Duration::from_millis(250);
const COME_BACK: Duration = Duration::from_millis(100);
/// The time between counting the shelf and counting the pieces set aside.
const WALK: Duration = Duration::from_millis(500);

/// Serves until `stop`. Without a client, it serves without a lock.
pub(crate) async fn serve(
    incoming: TcpIncoming,
    stock: Stock,
    locks: Option<LockClient>,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let hall = InventoryServer::new(Hall {
        stock: Arc::new(stock),
    });
    match locks {
        Some(locks) => {
            // One request at a time for each item, until the last frame has been sent, so that a
            // stock count is exact.
            let lock = LockLayer::new(locks, "item:{header.x-item}")?
                .hold_until(HoldUntil::Body)
                .wait(WAIT)
                .retry_after(COME_BACK);
            Server::builder()
                .layer(lock)
                .add_service(hall)
                .serve_with_incoming_shutdown(incoming, stop)
                .await?;
        }
        None => {
            Server::builder()
                .add_service(hall)
                .serve_with_incoming_shutdown(incoming, stop)
                .await?
        }
    }
    Ok(())
}

struct Hall {
    stock: Arc<Stock>,
}

#[tonic::async_trait]
impl Inventory for Hall {
    async fn reserve(&self, request: Request<Wanted>) -> Result<Response<Quantity>, Status> {
        let fence = fence(&request, &request.get_ref().item)?;
        let Wanted { item, quantity } = request.into_inner();
        let Pieces {
            on_the_shelf,
            set_aside,
        } = self.look_at(&item).await?;
        let Some(on_the_shelf) = on_the_shelf.checked_sub(quantity) else {
            return Err(Status::failed_precondition("not enough pieces are left"));
        };
        self.stock.write(
            &item,
            Pieces {
                on_the_shelf,
                set_aside: set_aside + quantity,
            },
            fence,
        )?;
        Ok(Response::new(Quantity {
            quantity: on_the_shelf,
        }))
    }

    async fn release(&self, request: Request<Wanted>) -> Result<Response<Quantity>, Status> {
        let fence = fence(&request, &request.get_ref().item)?;
        let Wanted { item, quantity } = request.into_inner();
        let Pieces {
            on_the_shelf,
            set_aside,
        } = self.look_at(&item).await?;
        let Some(set_aside) = set_aside.checked_sub(quantity) else {
            return Err(Status::failed_precondition(
                "not enough pieces are set aside",
            ));
        };
        let on_the_shelf = on_the_shelf + quantity;
        self.stock.write(
            &item,
            Pieces {
                on_the_shelf,
                set_aside,
            },
            fence,
        )?;
        Ok(Response::new(Quantity {
            quantity: on_the_shelf,
        }))
    }

    type CountStockStream = BoxStream<'static, Result<Place, Status>>;

    async fn count_stock(
        &self,
        request: Request<Item>,
    ) -> Result<Response<Self::CountStockStream>, Status> {
        fence(&request, &request.get_ref().item)?;
        let Item { item } = request.into_inner();
        let stock = self.stock.clone();
        let places = stream::iter(["on the shelf", "set aside"])
            .enumerate()
            .then(move |(number, name)| {
                let (stock, item) = (stock.clone(), item.clone());
                async move {
                    if number > 0 {
                        sleep(WALK).await;
                    }
                    let pieces = stock.read(&item).ok_or_else(unknown)?;
                    let quantity = if number > 0 {
                        pieces.set_aside
                    } else {
                        pieces.on_the_shelf
                    };
                    Ok(Place {
                        name: name.to_owned(),
                        quantity,
                    })
                }
            });
        Ok(Response::new(places.boxed()))
    }
}

impl Hall {
    /// A read and a pause, before a write. Two concurrent calls read the same number and sell the
    /// same pieces.
    async fn look_at(&self, item: &str) -> Result<Pieces, Status> {
        let pieces = self.stock.read(item).ok_or_else(unknown)?;
        yield_now().await;
        Ok(pieces)
    }
}

/// Returns the fencing token of the request's lock, or `None` without a lock. The layer locks the
/// item of the metadata, so the message must name the same item.
fn fence<T>(request: &Request<T>, item: &str) -> Result<Option<FencingToken>, Status> {
    match request.metadata().get("x-item") {
        Some(named) if named == item => Ok(request.extensions().get().map(HeldLock::fence)),
        _ => Err(Status::invalid_argument(
            "the metadata `x-item` does not name the item of the message",
        )),
    }
}

fn unknown() -> Status {
    Status::not_found("there is no such item")
}

impl From<Stale> for Status {
    fn from(_: Stale) -> Self {
        Self::aborted("another request has locked the item since")
    }
}
