//! A tonic server on its own port whose handlers are controlled by the test, and its clients.

use std::{net::Ipv4Addr, sync::Arc};

use futures_util::future::BoxFuture;
use lock_examples::inventory::{
    Item, Pieces, Place, Quantity,
    inventory_client::InventoryClient,
    inventory_server::{Inventory, InventoryServer},
};
use lock_runtime::HeldLock;
use lock_tower::LockLayer;
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinHandle,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Request, Response, Status,
    metadata::MetadataValue,
    transport::{Channel, Error, Server, server::TcpIncoming},
};

use lock_tests::place::in_time;

pub(super) type Client = InventoryClient<Channel>;
pub(super) type Service = InventoryServer<Hall>;

/// A `Reserve` call that has reached its handler.
pub(super) struct Reserving {
    pub(super) held: Option<HeldLock>,
    /// Sends the result of the call. Closed when the handler is dropped.
    pub(super) answer: oneshot::Sender<Result<(), Status>>,
}

/// A `CountStock` call that has reached its handler.
pub(super) struct Counting {
    pub(super) held: Option<HeldLock>,
    /// Sends messages of the stream, which ends when this is dropped. Closed when the stream is
    /// dropped.
    pub(super) places: mpsc::Sender<Result<Place, Status>>,
}

type Releasing = Arc<dyn Fn(HeldLock) -> BoxFuture<'static, Result<(), Status>> + Send + Sync>;

/// The service: the test answers `Reserve` and `CountStock`; `Release` runs a given function.
pub(super) struct Hall {
    reserving: mpsc::UnboundedSender<Reserving>,
    counting: mpsc::UnboundedSender<Counting>,
    releasing: Releasing,
}

/// The calls that have reached their handlers, in order.
pub(super) struct Entries {
    reserving: mpsc::UnboundedReceiver<Reserving>,
    counting: mpsc::UnboundedReceiver<Counting>,
}

/// A service that is controlled by the test, with a `Release` that does nothing.
pub(super) fn hall() -> (Service, Entries) {
    hall_with(|_| async { Ok(()) })
}

/// Like [`hall`], with a `Release` that runs `releasing`.
pub(super) fn hall_with<F>(
    releasing: impl Fn(HeldLock) -> F + Send + Sync + 'static,
) -> (Service, Entries)
where
    F: Future<Output = Result<(), Status>> + Send + 'static,
{
    let (reserving, reserves) = mpsc::unbounded_channel();
    let (counting, counts) = mpsc::unbounded_channel();
    let releasing: Releasing = Arc::new(move |held| Box::pin(releasing(held)));
    let hall = Hall {
        reserving,
        counting,
        releasing,
    };
    (
        InventoryServer::new(hall),
        Entries {
            reserving: reserves,
            counting: counts,
        },
    )
}

impl Entries {
    pub(super) async fn reserve(&mut self) -> Reserving {
        in_time(self.reserving.recv()).await.unwrap()
    }

    pub(super) async fn count(&mut self) -> Counting {
        in_time(self.counting.recv()).await.unwrap()
    }

    /// The next `Reserve` that has already reached its handler, if any.
    pub(super) fn entered(&mut self) -> Option<Reserving> {
        self.reserving.try_recv().ok()
    }
}

#[tonic::async_trait]
impl Inventory for Hall {
    async fn reserve(&self, request: Request<Pieces>) -> Result<Response<Quantity>, Status> {
        let (answer, told) = oneshot::channel();
        self.reserving
            .send(Reserving {
                held: request.extensions().get().cloned(),
                answer,
            })
            .unwrap();
        told.await
            .unwrap()
            .map(|()| Response::new(Quantity::default()))
    }

    async fn release(&self, request: Request<Pieces>) -> Result<Response<Quantity>, Status> {
        let held = request
            .extensions()
            .get()
            .cloned()
            .ok_or_else(|| Status::internal("no lock"))?;
        (self.releasing)(held)
            .await
            .map(|()| Response::new(Quantity::default()))
    }

    type CountStockStream = ReceiverStream<Result<Place, Status>>;

    async fn count_stock(
        &self,
        request: Request<Item>,
    ) -> Result<Response<Self::CountStockStream>, Status> {
        let (places, told) = mpsc::channel(1);
        self.counting
            .send(Counting {
                held: request.extensions().get().cloned(),
                places,
            })
            .unwrap();
        Ok(Response::new(ReceiverStream::new(told)))
    }
}

/// A running server. It accepts no more connections when it is dropped.
pub(super) struct Served {
    url: String,
    task: JoinHandle<()>,
}

impl Served {
    /// Serves `service` with `lock` around the whole server.
    pub(super) fn under(lock: LockLayer, service: Service) -> Self {
        Self::by(move |incoming| {
            Server::builder()
                .layer(lock)
                .add_service(service)
                .serve_with_incoming(incoming)
        })
    }

    pub(super) fn by<F>(serve: impl FnOnce(TcpIncoming) -> F) -> Self
    where
        F: Future<Output = Result<(), Error>> + Send + 'static,
    {
        let incoming = TcpIncoming::bind((Ipv4Addr::LOCALHOST, 0).into())
            .unwrap()
            .with_nodelay(Some(true));
        let url = format!("http://{}", incoming.local_addr().unwrap());
        let serving = serve(incoming);
        Self {
            url,
            task: tokio::spawn(async { serving.await.unwrap() }),
        }
    }

    /// A client with its own connection.
    pub(super) async fn client(&self) -> Client {
        InventoryClient::new(self.channel().await)
    }

    pub(super) async fn channel(&self) -> Channel {
        Channel::from_shared(self.url.clone())
            .unwrap()
            .connect()
            .await
            .unwrap()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(super) fn item(item: &'static str) -> Request<Item> {
    of(
        item,
        Item {
            item: item.to_owned(),
        },
    )
}

pub(super) fn pieces(item: &'static str) -> Request<Pieces> {
    of(
        item,
        Pieces {
            item: item.to_owned(),
            quantity: 1,
        },
    )
}

pub(super) fn of<T>(item: &'static str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request
        .metadata_mut()
        .insert("x-item", MetadataValue::from_static(item));
    request
}

/// Starts a `Reserve` call. Aborting the task cancels the call.
pub(super) fn reserve(client: &Client, item: &'static str) -> JoinHandle<Result<(), Status>> {
    let mut client = client.clone();
    tokio::spawn(async move { client.reserve(pieces(item)).await.map(drop) })
}
